"""A head for anyone's model, by the commands of the README: tiny targets of two families as Transformers saves them."""

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.test_cli import aquiline, check_refused  # noqa: F401 (a fixture)

# As in these families' own folders, without what concerns tools.
QWEN = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
        {{- content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- ' [INST] ' + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""

# Every name recites one of a few orders of the same words, so the next word depends on more than the last one: it is
# the target's states that tell which order it is.
WORDS = [a + b for a in ("ka", "le", "mi", "no") for b in ("ruba", "sadi", "tegu", "vifo")]
ORDERS = [" ".join(random.Random(n).sample(WORDS, len(WORDS))) for n in range(4)]
NAMES = [a + b for a in ("Ada", "Bo", "Cyr", "Dan", "Eva", "Fay", "Gus") for b in ("bel", "dan", "mir", "ton")]
TALKS = [(f"Who is {name}?", f"{name} is {ORDERS[n % 4]}.") for n, name in enumerate(NAMES)]
SIZES = {
    "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip


def qwen(folder: Path) -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([text for talk in TALKS for text in talk] + ["user assistant system"], trainer)
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["<think>", "</think>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=QWEN)
    config = Qwen3Config(
        vocab_size=len(tokenizer) + 5,  # more rows than tokens, as there
        num_hidden_layers=8, head_dim=24, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, **SIZES,
    )  # fmt: skip
    save(folder, Qwen3ForCausalLM(config), tokenizer, {"enable_thinking": False})


def mistral(folder: Path) -> None:
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    backend.train_from_iterator([f"[INST] {q} [/INST] {a}" for q, a in TALKS], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=MISTRAL
    )
    config = MistralConfig(vocab_size=len(tokenizer), num_hidden_layers=7, sliding_window=None, **SIZES)
    save(folder, MistralForCausalLM(config), tokenizer, {})


def save(folder: Path, model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, template_kwargs: dict) -> None:
    """Teach the target to recite, for else it decodes to noise, and write its folder."""
    rows = []
    for question, reply in TALKS:
        talk = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True, **template_kwargs)
        text = f"{prompt}{' ' if prompt.endswith(']') else ''}{reply}{tokenizer.eos_token}"
        rows.append(torch.tensor(tokenizer(text, add_special_tokens=False).input_ids))
    ids, labels = (torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=v) for v in (0, -100))
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    for _ in range(130):
        picked = torch.randperm(len(rows))[:14]
        optimizer.zero_grad()
        model(ids[picked], labels=labels[picked]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


FAMILIES = {"my-qwen": (qwen, ("--template-kwarg", "enable_thinking=false")), "my-mistral": (mistral, ())}
FLOAT32 = ("--dtype", "float32", "--device", "cpu")
CHAIN = ("--tree", "4:1:4")  # a tree's many guesses would hit now and then whatever the head says


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What a stranger has: two models and a file of prompts."""
    root = tmp_path_factory.mktemp("strangers")
    for name, (make, _) in FAMILIES.items():
        torch.manual_seed(0)
        make(root / name)
    (root / "prompts.txt").write_text("".join(question + "\n" for question, _ in TALKS))
    return root


@pytest.mark.filterwarnings("ignore:the data has")
def test_heads_for_models_that_nobody_here_has_seen(aquiline, folder, monkeypatch):  # noqa: F811
    """From prompts to a head that helps, each command of the README with its `--target`; neither fits the other."""
    monkeypatch.chdir(folder)
    for name, (_, template) in FAMILIES.items():
        train_and_measure(aquiline, name, template)
    sizes = {name: json.loads(Path(name, "config.json").read_text())["vocab_size"] for name in FAMILIES}
    for mine, other in (("my-qwen", "my-mistral"), ("my-mistral", "my-qwen")):
        head, target = Path(f"run-{mine}", "head"), ("--target", other)
        words = f"made for a target with vocabulary {sizes[mine]}, this target has {sizes[other]}"
        check_refused(aquiline("generate", "hi", *target, "--draft", head), words)
        train = ("train", f"{other}.jsonl", "--out", "never", *target, "--held-out", 4)
        check_refused(aquiline(*train, "--warm-start", head), words)
        words = f"{mine}.jsonl:1 holds the ids of another tokenizer, that of {mine}"
        check_refused(aquiline("train", f"{mine}.jsonl", *train[2:]), words)
    assert not Path("never").exists()


def train_and_measure(aquiline, name: str, template: tuple[str, ...]) -> None:  # noqa: F811
    def ok(*arguments) -> tuple[str, str]:
        code, out, err = aquiline(*arguments)
        assert code == 0, err
        return out, err

    invented, answers, run, target = f"{name}-invented.jsonl", f"{name}.jsonl", f"run-{name}", ("--target", name)
    ok("data", "invent", invented, *target, *FLOAT32, "--count", 2)
    ok("data", "answer", "prompts.txt", invented, answers, *target, *template, *FLOAT32)
    assert TALKS[0][0] in ok("data", "show", answers, *target)[0]
    settings = ("--held-out", 4, "--epochs", 30, "--batch-tokens", 120, "--ttt-steps", 3, "--decode-every", 0)
    rates = ("--learning-rate", 0.01, "--adamw-learning-rate", 0.005)
    ok(
        "train",
        answers,
        "--out",
        run,
        "--features",
        f"{run}/features",
        *target,
        "--dtype",
        "float32",
        *settings,
        *rates,
    )

    head = Path(run, "head")
    record = json.loads((head / "run.json").read_text())
    assert record["target"]["target"] == name
    assert record["target"]["target_layers"] == json.loads(Path(name, "config.json").read_text())["num_hidden_layers"]
    assert record["data"]["held_out"] == 4
    pair = (*target, "--draft", head, *FLOAT32, *CHAIN, *template)
    out, err = ok("generate", TALKS[0][0], *pair, "--compare", "--json")
    assert "warning" not in err
    result = json.loads(out)
    assert result["equal"] is True
    assert result["token_ids"] == by_transformers(name, result)
    ok("eval", "prompts.txt", *pair, "--json", "record.json")
    task = json.loads(Path("record.json").read_text())["tasks"]["prompts"]
    assert (task["prompts"], task["equal_share"]) == (len(TALKS), 1.0)
    assert task["tau"] > 3.5  # of 5; with states shifted by one in decoding, or in training, it is 3.0 at most


def by_transformers(name: str, result: dict) -> list[int]:
    """What the family's own code writes; that both of our ways agree does not show that the folder was read right."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    talk = [{"role": "user", "content": TALKS[0][0]}]
    given = tokenizer.apply_chat_template(
        talk, add_generation_prompt=True, return_tensors="pt", return_dict=True, enable_thinking=False
    )
    length = given["input_ids"].shape[1]
    assert length == result["prompt_tokens"]
    return model.generate(**given, max_new_tokens=256, do_sample=False)[0, length:].tolist()
