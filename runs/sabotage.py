"""One fault at a time in the head that comes with the package, or in what it is used with: does `aquiline doctor` name
it? Writes docs/records/sabotage.json, a case at a time.

    python runs/sabotage.py [NAME ...]
"""

import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # works from a checkout, installed or not

from aquiline import api  # noqa: E402
from aquiline.config import UserError  # noqa: E402
from aquiline.files import checkpoint  # noqa: E402
from aquiline.files.disk import write_json_atomic  # noqa: E402
from aquiline.measure import doctor, replies  # noqa: E402
from aquiline.measure.evaluate import machine, versions  # noqa: E402
from aquiline.measure.symptoms import refusal  # noqa: E402

OUT = ROOT / "docs" / "records" / "sabotage.json"
TOKENS = 96
# Of a head's config and tensors, given the target's embedding.
Edit = Callable[[dict[str, Any], dict[str, Tensor], Tensor], None]


def random(weight: Tensor) -> Tensor:
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return (noise * weight.float().std()).to(weight.dtype)


def normal(weight: Tensor) -> Tensor:
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).to(weight.dtype)


def put(name: str, make: Callable[[Tensor], Tensor]) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor) -> None:
        tensors[name] = make(tensors[name])

    return edit


def drop(name: str) -> Edit:
    return lambda config, tensors, embedding: (tensors.pop(name), None)[1]


def say(**keys: Any) -> Edit:
    return lambda config, tensors, embedding: config.update(keys)


def shift(by: int) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor) -> None:
        config["capture_after"] = [layer + by for layer in config["capture_after"]]

    return edit


def swap_states(a: int, b: int) -> Edit:
    def swapped(weight: Tensor) -> Tensor:
        parts = list(weight.chunk(3, dim=1))
        parts[a], parts[b] = parts[b], parts[a]
        return torch.cat(parts, dim=1).contiguous()

    return put("fc.weight", swapped)


def rope(theta: float) -> Edit:
    return say(rope_theta=theta, rope_parameters={"rope_theta": theta, "rope_type": "default"})


def remap(make: Callable[[Tensor, int], Tensor]) -> Edit:
    """`make` turns the true ids into wrong ones, which `d2t` and `t2d` agree on."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor) -> None:
        counting = torch.arange(len(tensors["d2t"]))
        wrong = make(tensors["d2t"] + counting, config["vocab_size"])
        tensors["d2t"] = wrong - counting
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool)
        tensors["t2d"][wrong] = True

    return edit


def arange(config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor) -> None:
    tensors["d2t"] = torch.arange(len(tensors["d2t"]))


def arange_without_t2d(config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor) -> None:
    arange(config, tensors, embedding)
    del tensors["t2d"]


def shuffled_embedding(config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor) -> None:
    order = torch.randperm(len(embedding), generator=torch.Generator().manual_seed(0))
    tensors["embed_tokens.weight"] = embedding[order]
    config["own_embedding"] = True


def halved(config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor) -> None:
    """A vocabulary that lacks every second of its tokens."""
    ids = (tensors["d2t"] + torch.arange(len(tensors["d2t"])))[::2]
    tensors |= {"lm_head.weight": tensors["lm_head.weight"][::2].contiguous(), "d2t": ids - torch.arange(len(ids))}
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool)
    tensors["t2d"][ids] = True
    config["draft_vocab_size"] = len(ids)


def stranger(config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor) -> None:
    """As another project's head: nothing says what it was trained for."""
    del config["aquiline"]


def both(*edits: Edit) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor) -> None:
        for one in edits:
            one(config, tensors, embedding)

    return edit


def zero(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight)


def ones(weight: Tensor) -> Tensor:
    return torch.ones_like(weight)


ATTENTION, MLP = "midlayer.self_attn", "midlayer.mlp"
# Name: the ids that name the fault, and what is done to config and tensors.
FAULTS: dict[str, tuple[set[str], Edit]] = {
    "fc zeroed": ({"fc_zero"}, put("fc.weight", zero)),
    "fc random": ({"fc"}, put("fc.weight", random)),
    "low and middle state swapped": ({"capture_order"}, swap_states(0, 1)),
    "middle and high state swapped": ({"capture_order"}, swap_states(1, 2)),
    "low and high state swapped": ({"capture_order"}, swap_states(0, 2)),
    "capture one layer late": ({"capture_shift"}, shift(1)),
    "capture one layer early": ({"capture_shift"}, shift(-1)),
    "rope base 10000": ({"rope_base"}, rope(1e4)),
    "rope base 100": ({"rope_base"}, rope(100.0)),
    "d2t counts 0, 1, 2": ({"d2t"}, arange),
    "d2t counts 0, 1, 2, no t2d": ({"d2t"}, arange_without_t2d),
    "d2t one id too high": ({"d2t"}, remap(lambda ids, size: (ids + 1) % size)),
    "d2t rolled by one": ({"d2t"}, remap(lambda ids, size: ids.roll(1))),
    "lm_head random": ({"lm_head"}, put("lm_head.weight", random)),
    "lm_head rows shuffled": ({"lm_head", "d2t"}, put("lm_head.weight", lambda w: w.flip(0).contiguous())),
    "norm missing": ({"norm"}, drop("norm.weight")),
    "norm all ones": ({"norm"}, put("norm.weight", ones)),
    "norm random": ({"norm"}, put("norm.weight", normal)),
    "hidden_norm zeroed": ({"norm"}, put("midlayer.hidden_norm.weight", zero)),
    "hidden_norm random": ({"norm"}, put("midlayer.hidden_norm.weight", normal)),
    "attention output zeroed": ({"attention"}, put(f"{ATTENTION}.o_proj.weight", zero)),
    "attention output random": ({"attention"}, put(f"{ATTENTION}.o_proj.weight", random)),
    "queries random": ({"attention"}, put(f"{ATTENTION}.q_proj.weight", random)),
    "mlp zeroed": ({"mlp"}, put(f"{MLP}.down_proj.weight", zero)),
    "mlp random": ({"mlp"}, put(f"{MLP}.up_proj.weight", random)),
    "own embedding shuffled": ({"embedding"}, shuffled_embedding),
    "norm_before_residual on": ({"norm_before_residual"}, say(norm_before_residual=True)),
    "norm_output on": ({"norm_output"}, say(norm_output=True)),
    "half the draft vocabulary": ({"coverage"}, halved),
    "one layer late, of a stranger": ({"capture_shift"}, both(stranger, shift(1))),
}
HEALTHY: dict[str, Edit] = {"as it is": lambda config, tensors, embedding: None, "of a stranger": stranger}


def write(head: Path, folder: Path, edit: Edit, embedding: Tensor) -> Path:
    """The head with the edit done to it, without run.json."""
    config = json.loads((head / "config.json").read_text("utf-8"))
    tensors = safetensors.torch.load_file(head / "model.safetensors")
    edit(config, tensors, embedding)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


class Bench:
    """The default target twice: to load heads for, and packed, to judge them on; its answers, once."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.chat = api.load_chat("default")
        every = tuple(range(checkpoint.read_target_config("default").num_layers))
        self.target = checkpoint.load_target("default", dtype, "cpu", every)
        self.packed = checkpoint.load_target("default", dtype, "cpu", every)
        doctor.pack_for_trials(self.packed, every)
        self.answers = replies.answer(self.packed, self.chat, replies.own_prompts(), TOKENS)

    def look(self, folder: Path) -> doctor.Pair:
        """As `doctor.open_pair`, without loading a target."""
        chat, target = self.chat, self.target
        try:
            config = checkpoint.read_draft(folder, target).config
            target.capture_after = config.capture_after
            draft = checkpoint.load_draft(
                folder, target, tokenizer=chat.fingerprint(), template=chat.template_fingerprint()
            )
        except UserError as error:
            return doctor.Pair(self.packed, None, chat, [refusal(error)])
        pair = doctor.look_at(target, draft, folder, chat)
        pair.target = self.packed
        return pair

    def examine(self, pair: doctor.Pair) -> list[Any]:
        return pair.causes if pair.draft is None else doctor.examine(pair, self.answers).causes


def result(expected: set[str], causes: list[Any]) -> dict[str, Any]:
    ids = [c.id for c in causes]
    place = next((i for i, id in enumerate(ids, 1) if id in expected), None)
    return {
        "expected": sorted(expected),
        "place": place,
        "causes": [{"id": c.id, "certain": c.certain, "evidence": c.evidence} for c in causes],
    }


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    head = checkpoint.draft_path("default")
    bench = Bench(torch.bfloat16)
    embedding = bench.target.model.embed_tokens.weight.detach()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "head")
        cases = {name: (set(), edit) for name, edit in HEALTHY.items()} | FAULTS
        for name, (expected, edit) in cases.items():
            if names and name not in names:
                continue
            causes = bench.examine(bench.look(write(head, folder, edit, embedding)))
            found[name] = result(
                expected, [replace(c, evidence=c.evidence.replace(str(folder), "the head")) for c in causes]
            )
            if not names:  # after each, for it takes long
                record = {"results": found, "machine": machine(torch.device("cpu")), "versions": versions()}
                write_json_atomic(OUT, record)
            said = ", ".join(f"{c.id}{'!' if c.certain else ''}" for c in causes) or "nothing"
            print(f"{name}: {said}", flush=True)
            for c in causes:
                print(f"      {c.id} {c.weight:.2f} {c.evidence}"[:230], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
