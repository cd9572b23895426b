"""A head as an OpenVINO IR, made by optimum-intel where it is installed.

OpenVINO GenAI would capture the OUTPUT of layers 2, N/2 and N-3, one later than heads are trained for; it takes other
layers from the list `hidden_layers_list` in the IR's rt_info.
"""

import os
from pathlib import Path
from typing import Any

from aquiline.config import UserError
from aquiline.files.disk import one_line

_IR = "openvino_model"


def exporter() -> tuple[Any, Any]:
    """optimum-intel's export function and OpenVINO; UserError where they are not installed."""
    try:
        import openvino
        from optimum.exporters.openvino import main_export
    except ImportError as error:
        raise UserError(
            f"--to openvino needs optimum-intel, which cannot be imported ({one_line(error)}): pip install "
            "'optimum-intel[openvino]' einops 'diffusers<0.40' (it wants a Transformers before 5.6)"
        ) from error
    return main_export, openvino


def write_ir(source: Path, out: Path, capture_after: tuple[int, ...]) -> None:
    """Export `source`, a head in the plain layout with an embedding and a tokenizer, into the folder `out`."""
    main_export, openvino = exporter()
    try:
        main_export(
            str(source),
            str(out),
            task="text-generation-with-past",
            trust_remote_code=True,  # the exporter's own class of heads; the folder holds no code
            local_files_only=True,
            convert_tokenizer=True,
        )
        model = openvino.Core().read_model(out / f"{_IR}.xml")
        model.set_rt_info(list(capture_after), ["hidden_layers_list"])
        openvino.save_model(model, out / "listed.xml", compress_to_fp16=False)
        del model  # it maps the old weights
        for kind in ("xml", "bin"):
            os.replace(out / f"listed.{kind}", out / f"{_IR}.{kind}")
    except OSError:
        raise
    except Exception as error:  # the exporter raises whatever its parts raise
        raise UserError(f"optimum-intel could not export the head: {one_line(error)}") from error
