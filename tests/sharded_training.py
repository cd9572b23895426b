"""What test_shard.py starts in two processes: `aquiline train`, and a file that says what each held of its target."""

import functools
import gc
import json
import os
import sys
import weakref
from datetime import timedelta
from pathlib import Path

from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from aquiline.cli import main as cli
from aquiline.model.target import LlamaTarget, TargetLayer
from aquiline.train import run, shard


def held(target: LlamaTarget) -> int:
    """Bytes of the target's tensors in this process."""
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in target.parameters()]
    return sum(p.untyped_storage().nbytes() for p in parts)


def main(facts_file: str) -> None:
    """The rest of the command line is that of `aquiline train`."""
    facts = {"at_once": 0, "passes": 0, "stand_ins": 0}
    targets: list[LlamaTarget] = []
    run_layer, run_target = TargetLayer.forward, LlamaTarget.forward

    def sharding(target: LlamaTarget, device: str) -> None:
        facts["whole"] = held(target)
        before = [weakref.ref(p) for p in target.parameters()]
        shard.shard(target, device)
        gc.collect()
        facts["left_over"] = sum(p() is not None for p in before)
        targets.append(target)

    def layer_forward(layer: TargetLayer, *given):
        gathered = [x for x in targets[0].model.layers if not any(isinstance(p, DTensor) for p in x.parameters())]
        facts["at_once"] = max(facts["at_once"], len(gathered))
        return run_layer(layer, *given)

    def target_forward(target: LlamaTarget, ids_BN: Tensor, *given, **named):
        facts["passes"] += 1
        facts["stand_ins"] += not named
        return run_target(target, ids_BN, *given, **named)

    # A pass that one process leaves out holds the others: an error after this time, not after half an hour.
    distributed.init_process_group = functools.partial(distributed.init_process_group, timeout=timedelta(minutes=1))
    run.shard = sharding
    TargetLayer.forward, LlamaTarget.forward = layer_forward, target_forward
    try:
        cli.main()
    finally:
        facts["held"] = held(targets[0])
        Path(f"{facts_file}.{os.environ['RANK']}").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv.pop(1))
