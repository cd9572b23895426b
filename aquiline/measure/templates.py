"""The same replies behind prompts as other chat templates write them: a head that does clearly better there was trained
with such a one. It is the given template that has the advantage, as the target wrote the replies behind it.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from aquiline.config import UserError
from aquiline.data.chat import Chat, Message
from aquiline.measure.judge import TRIAL_STEPS, Gain, Judged, judge
from aquiline.measure.replies import Answers, behind, with_system
from aquiline.measure.trials import Trial
from aquiline.model.draft import Draft
from aquiline.model.target import Target

SYSTEM = "You are a helpful assistant."  # which many templates write of themselves
_ADVICE = {
    "template": "the head was trained with a chat template more like that one than the target's own: put the template "
    "of its training into the target's chat_template.jinja, or train it on answers written with this one",
    "system_prompt": "decode with the system message of its training, or train on answers that were given without it",
}


@dataclass(frozen=True)
class Template:
    """What stands around a turn of each role, and before the reply. `start`: where the tokenizer has such a token."""

    user: str
    assistant: str
    system: str = ""  # it takes none
    reply: str = ""
    start: str = ""

    def written(self, chat: Chat, messages: Sequence[Message]) -> list[int] | None:
        """Ids of a prompt; None where the tokenizer lacks one of the markers, or a turn is of another kind."""
        forms = {"user": self.user, "assistant": self.assistant, "system": self.system}
        markers = set(re.findall(r"<[^>]+>", "".join((*forms.values(), self.reply))))
        if any(len(chat.encode(marker)) != 1 for marker in markers):
            return None
        text = ""
        for message in messages:
            form, content = forms.get(message["role"]), message.get("content")
            if not form or not isinstance(content, str):
                return None
            text += form.replace("{}", content)
        start = chat.encode(self.start)
        return (start if len(start) == 1 else []) + chat.encode(text + self.reply)


def _of_one_form(turn: str, start: str = "") -> Template:
    user, assistant, system = (turn.replace("ROLE", role) for role in ("user", "assistant", "system"))
    return Template(user, assistant, system, assistant.partition("{}")[0], start)


TEMPLATES = {
    "no template": Template("{}\n", "{}\n", "{}\n"),
    "ChatML": _of_one_form("<|im_start|>ROLE\n{}<|im_end|>\n"),
    "Llama 3": _of_one_form("<|start_header_id|>ROLE<|end_header_id|>\n\n{}<|eot_id|>", "<|begin_of_text|>"),
    "Llama 2 or Mistral": Template("[INST] {} [/INST]", " {} ", start="<s>"),
    "Gemma": Template(
        "<start_of_turn>user\n{}<end_of_turn>\n", "<start_of_turn>model\n{}<end_of_turn>\n",
        reply="<start_of_turn>model\n", start="<bos>",
    ),
    "Phi": _of_one_form("<|ROLE|>\n{}<|end|>\n"),
    "Zephyr": _of_one_form("<|ROLE|>\n{}</s>\n"),
    "Vicuna": Template("USER: {} ASSISTANT:", " {} ", "{} ", start="<s>"),
}  # fmt: skip


def other_templates(
    draft: Draft, target: Target, chat: Chat, base: Judged, answers: Answers, rows_T: Tensor
) -> Iterator[tuple[Trial, Gain]]:
    """The head on the same replies behind other prompts, and what it gains over `base`."""
    for id, name, prompts in _other_prompts(chat, answers):
        if prompts == [d.ids[~d.supervised].tolist() for d in answers.documents]:
            continue
        other = behind(target, answers, prompts)
        judged = judge(draft, target, other.documents, other.features(draft.config.capture_after), TRIAL_STEPS)
        gain = Gain.of(base, judged.laid_as(base), answers.documents, rows_T)
        yield Trial(id, f"with the same replies behind prompts {name}", _ADVICE[id]), gain


def _other_prompts(chat: Chat, answers: Answers) -> Iterator[tuple[str, str, list[list[int]]]]:
    asked = answers.messages
    for name, template in TEMPLATES.items():
        written = [template.written(chat, messages) for messages in asked]
        prompts = [ids for ids in written if ids]
        if len(prompts) == len(written):
            yield "template", f"as {name} has them", prompts
    with contextlib.suppress(UserError):  # it takes no system message
        yield (
            "system_prompt",
            f"with the system message {SYSTEM!r}",
            [chat.render(with_system(messages, SYSTEM), **answers.template_kwargs) for messages in asked],
        )
