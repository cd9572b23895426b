"""`train`, and `export-target`, which gives other trainers and engines the same target."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from aquiline.cli.shared import (
    DeviceFlag,
    DtypeFlag,
    PauseFlag,
    StrictFlag,
    TargetFlag,
    app,
    note,
    progress,
)
from aquiline.config import DEFAULT_DRAFT_VOCAB, SWITCHES, TOP, TrainConfig, capture_name, require

if TYPE_CHECKING:
    import torch

    from aquiline.train import loop
    from aquiline.train.run import TrainingRun


_FEW_UPDATES = 100


@app.command()
def train(
    data: Annotated[
        list[Path],
        typer.Argument(
            help="JSONL: answers, or conversations. Or folders of SpecForge's or speculators' hidden states."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The run's folder; the head is in OUT/head.")],
    target: TargetFlag = "default",
    features: Annotated[
        Path | None, typer.Option("--features", help="Keep the target's features there. [default: computed each time]")
    ] = None,
    capture_after: Annotated[
        str | None, typer.Option("--capture-after", help="Layers A,B,C whose output the draft reads, or 'top'.")
    ] = None,
    warm_start: Annotated[
        str | None,
        typer.Option("--warm-start", help="Begin with this head: folder, hub id or 'default'. Its vocabulary is kept."),
    ] = None,
    epochs: Annotated[float, typer.Option("--epochs")] = TrainConfig.epochs,
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", help="Of one pack.")] = TrainConfig.batch_tokens,
    accumulate: Annotated[int, typer.Option("--accumulate", help="Packs of one update.")] = TrainConfig.accumulate,
    max_length: Annotated[int, typer.Option("--max-length", help="Rows are cut there.")] = TrainConfig.max_length,
    ttt_steps: Annotated[int, typer.Option("--ttt-steps", help="Steps of the unroll.")] = TrainConfig.ttt_steps,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            "--draft-vocab-size", help=f"Tokens it can propose. [default: the warm start's, else {DEFAULT_DRAFT_VOCAB}]"
        ),
    ] = TrainConfig.draft_vocab_size,
    loss: Annotated[str, typer.Option("--loss", help="ce or lk.")] = TrainConfig.loss,
    feature_loss: Annotated[
        bool, typer.Option("--feature-loss", help="Also regress the next feature; with --capture-after top.")
    ] = False,
    switch: Annotated[
        list[str] | None, typer.Option("--switch", help=f"Repeatable: {', '.join(SWITCHES)}.", metavar="NAME")
    ] = None,
    init: Annotated[
        str, typer.Option("--init", help="random, or target-layer: a copy of the target's last layer.")
    ] = TrainConfig.init,
    freeze_lm_head: Annotated[
        bool, typer.Option("--freeze-lm-head", help="Do not train lm_head: it stays what the run begins with.")
    ] = False,
    keep_outside: Annotated[
        bool,
        typer.Option("--keep-outside", help="Do not leave rows out of the loss whose best token it cannot propose."),
    ] = False,
    checkpoint_activations: Annotated[
        bool, typer.Option("--checkpoint-activations", help="Less memory, more time.")
    ] = False,
    optimizer: Annotated[str, typer.Option("--optimizer", help="muon or adamw.")] = TrainConfig.optimizer,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", help="Of what muon trains: the matrices.")
    ] = TrainConfig.learning_rate,
    adamw_learning_rate: Annotated[
        float, typer.Option("--adamw-learning-rate", help="Of what muon leaves to AdamW; with adamw, of everything.")
    ] = TrainConfig.adamw_learning_rate,
    held_out: Annotated[
        int, typer.Option("--held-out", help="Greedy rows kept apart to measure tau.")
    ] = TrainConfig.held_out,
    eval_every: Annotated[int, typer.Option("--eval-every", help="Updates.")] = TrainConfig.eval_every,
    decode_every: Annotated[
        int, typer.Option("--decode-every", help="Evaluations; then some prompts are really decoded. 0 is never.")
    ] = TrainConfig.decode_every,
    patience: Annotated[
        int, typer.Option("--patience", help="End after so many evaluations without a better tau. 0 is never.")
    ] = TrainConfig.patience,
    save_every: Annotated[int, typer.Option("--save-every", help="Updates.")] = TrainConfig.save_every,
    seed: Annotated[int, typer.Option("--seed")] = TrainConfig.seed,
    shard_target: Annotated[
        bool, typer.Option("--shard-target", help="Under torchrun: each process holds a part of the target.")
    ] = False,
    pause_file: PauseFlag = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take; nothing is written.")] = False,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
    strict: StrictFlag = False,
) -> None:
    """Train a head. The same command goes on where a stopped run left off; under torchrun, processes share the work."""
    config = TrainConfig(
        optimizer=optimizer, learning_rate=learning_rate, adamw_learning_rate=adamw_learning_rate,
        ttt_steps=ttt_steps, batch_tokens=batch_tokens, accumulate=accumulate, max_length=max_length, epochs=epochs,
        draft_vocab_size=draft_vocab_size, eval_every=eval_every, decode_every=decode_every, patience=patience,
        save_every=save_every, held_out=held_out, seed=seed,
        loss=loss, feature_loss=feature_loss, switches=tuple(switch or ()), init=init,
        train_lm_head=not freeze_lm_head, skip_outside=not keep_outside, checkpoint_activations=checkpoint_activations,
    )  # fmt: skip
    layers = None if capture_after is None else _layers(capture_after)
    from aquiline import api
    from aquiline.train.parallel import Processes
    from aquiline.train.run import TrainingRun

    require(
        not (shard_target and dry_run),
        "--dry-run tries updates in one process, which has no whole target with --shard-target: leave one of them out",
    )
    where = _own_device(device)
    processes = Processes.joined(where)
    kind = api.pick_dtype(dtype, target, where, trains=True)
    chat = api.load_chat(target)
    run = TrainingRun.prepare(
        data, out, target, chat, config,
        dtype=kind, device=where, capture_after=layers, features=features, warm_start=warm_start, strict=strict,
        command=["aquiline", *_plain_command(sys.argv[1:])], shard_target=shard_target, processes=processes,
    )  # fmt: skip
    if dry_run:
        _print_run(run)
        _print_estimate(run, pause_file)
        return
    stopped: list[int] = []
    with processes, progress() as bar:
        if processes.first:
            _print_run(run)
            if decode_every and not run.config.decode_every:
                why = "with --shard-target no process could" if shard_target else "the target's layers are not loaded"
                note(f"no prompts are really decoded on the way: {why}")
        report = _training_report(bar)
        before = {
            s: signal.signal(s, lambda number, _: stopped.append(number)) for s in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            complete = run.run(report, lambda: bool(stopped), pause_file, processes)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if not processes.first:
        return
    if not complete:
        note(f"stopped and saved in {out}; the same command goes on from there")
        raise typer.Exit(128 + (stopped or [signal.SIGTERM])[0])
    note(f"complete; the head is {run.head}")


def _own_device(device: str | None) -> "torch.device":
    """Of several processes on a machine with GPUs each has its own."""
    from aquiline import api
    from aquiline.train.parallel import launched, local_number

    where = api.pick_device(device)
    if launched() == 1 or where.type == "cpu":
        return where
    require(
        where.index is None,
        f"--device {device} is one GPU, and {launched()} processes were started: leave the number out",
    )
    return api.pick_device(f"cuda:{local_number()}")


def _layers(text: str) -> tuple[int, ...]:
    if text == "top":
        return TOP
    parts = text.split(",")
    require(
        all(p.isdecimal() for p in parts), f"--capture-after {text!r} is not layers A,B,C, for example 1,14,26, or top"
    )
    return tuple(int(p) for p in parts)


def _plain_command(arguments: Sequence[str]) -> list[str]:
    """A command line without this machine's paths: of each, the last part."""
    return [a if os.sep not in a else a[: a.find("=") + 1] + os.path.basename(a.rstrip(os.sep)) for a in arguments]


def _print_run(run: "TrainingRun") -> None:
    from aquiline.data.features import FeatureStore
    from aquiline.files.disk import free_bytes

    table = Table(title="what the draft computes with")
    for name in ("tensor", "shape", "", "from"):
        table.add_column(name, no_wrap=name == "tensor")
    for row in run.tensors():
        table.add_row(*row)
    console = Console(stderr=True)
    console.print(table)
    data, target = run.record["data"], run.target
    needed = FeatureStore.bytes_needed(target, data["tokens"] + sum(map(len, run.held_out)))
    made = "computed" if run.stored is None else "read from their files"
    kept = f"kept in {run.features}" if run.features else f"{made} each time (--features would keep them)"
    captured = capture_name(target.capture_after)
    reads = "its final state captured" if captured == "top" else f"captured after layers {captured}"
    note(f"target {run.info.target} in {run.info.target_dtype} on {target.device}, {reads}")
    note(
        f"{data['documents']} documents, {data['tokens']} tokens, {data['supervised_tokens']} of them supervised; "
        f"{data['held_out']} held out; {data['cut']} cut at the longest length"
    )
    for reason, count in sorted(data["dropped"].items()):
        note(f"dropped: {count} {reason}")
    warm = run.record.get("warm_start")
    whose = "" if warm is None else f", that of {warm['head']}"
    if warm is not None and warm["held_out"] is None:
        note(f"{warm['head']} does not say which rows were held out of its training: it may have learnt those here")
    note(
        f"draft vocabulary {run.config.draft_vocab_size}{whose}: {data['coverage']:.1%} of the supervised tokens; "
        f"longest row {run.draft.config.trained_length}"
    )
    trained, frozen = run.parameters()
    note(f"{trained:,} parameters are trained, {frozen:,} frozen")
    free = free_bytes(run.features or run.out)
    note(f"features: {needed / 2**30:.2f} GiB on disk, {kept}; {free / 2**30:.2f} GiB are free there")
    if (run.out / "state" / "state.pt").exists():
        note(f"going on from the state in {run.out}")


def _note_if_few(updates: int) -> None:
    if updates < _FEW_UPDATES:
        note(f"warning: the whole run is {updates} updates, and a head takes hundreds: more answers, or more --epochs")


def _print_estimate(run: "TrainingRun", pause_file: Path | None) -> None:
    """What `--dry-run` adds. Really decoding now and then is not in the time."""
    from aquiline.measure.quiet import quiet

    if pause_file is not None:
        note("waiting until training runs stand still")
    with quiet(pause_file) as machine:
        note("trying a few updates")
        e = run.estimate()
    minutes = e.seconds / 60
    note(
        f"{e.updates} updates over {e.tokens} tokens, {e.update_seconds:.3g} s each ({e.features_share:.0%} of it "
        f"for the target's states); an evaluation {e.evaluation_seconds:.3g} s; about "
        + (f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours")
        + f" in all, as if no features were on disk yet; {e.memory / 2**30:.1f} GiB of memory"
        + (f", {e.gpu_memory / 2**30:.1f} GiB of the GPU's" if e.gpu_memory else "")
    )
    _note_if_few(e.updates)
    if machine.loaded:
        note(f"warning: other processes took {machine.load:.0%} of the machine meanwhile: the times are too long")
    note("nothing was written")


def _training_report(bar: Progress) -> "Callable[[loop.Progress], None]":
    """Show every update on a terminal; elsewhere, for a log, a line now and then and at every evaluation."""
    task = bar.add_task("training", total=None, note="")
    tau = ""

    def report(progress: "loop.Progress") -> None:
        nonlocal tau
        if progress.evaluation is not None and progress.evaluation.tau is not None:
            tau = f" · tau {progress.evaluation.tau:.3f}"
            for tree, value in (progress.evaluation.decoded or {}).items():
                tau += f" · decoded {tree} {value:.2f}"
        accuracy = " ".join(f"{a:.2f}" for a in progress.accuracy)
        skipped = f" · {progress.skipped} updates skipped, not finite" if progress.skipped else ""
        if progress.step == 1:
            _note_if_few(progress.total)
        line = (
            f"loss {progress.loss:.3f} · accuracy {accuracy}{tau}{skipped}" if progress.step else f"at the start{tau}"
        )
        bar.update(task, completed=progress.step, total=progress.total, note=line)
        if bar.disable and (progress.evaluation is not None or progress.step % 10 == 0 or progress.step == 1):
            note(f"{progress.step}/{progress.total} · {progress.seconds / 60:.1f} min · {line}")
        if progress.ended_early:
            note(f"ended early, after {progress.step} of {progress.total} updates: tau got no better (--patience)")

    return report


@app.command("export-target")
def export_target(
    target: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id or 'default'.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
) -> None:
    """Write a target and its tokenizer, in bf16, as a folder that Transformers and other engines load."""
    require(
        not out.exists() or (out.is_dir() and not any(out.iterdir())),
        f"{out} exists and is not empty; give a new folder",
    )
    import torch

    from aquiline import api
    from aquiline.files import checkpoint

    checkpoint.export_target(api.load_target(target, torch.bfloat16), api.load_chat(target), out)
    note(f"{checkpoint.target_name(target)} written to {out}")
