"""`serve`."""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from aquiline.cli.shared import (
    DeviceFlag,
    DraftFlag,
    DtypeFlag,
    ExactFlag,
    QuantizeDraftFlag,
    QuantizeFlag,
    TargetFlag,
    TemplateFlag,
    app,
    load_model,
    note,
    template_settings,
)
from aquiline.config import ServeConfig, UserError, require

KEY = "AQUILINE_API_KEY"


@app.command()
def serve(
    target: TargetFlag = "default",
    draft: DraftFlag = "default",
    host: Annotated[str, typer.Option("--host", help="Where to listen; 0.0.0.0 is everywhere.")] = ServeConfig.host,
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = ServeConfig.port,
    max_batch: Annotated[int, typer.Option("--max-batch", help="Requests decoded at a time.")] = ServeConfig.max_batch,
    queue: Annotated[int, typer.Option("--queue", help="Requests that may wait.")] = ServeConfig.queue,
    context: Annotated[
        int | None, typer.Option("--context", help="The most tokens of prompt and reply. [default: the target's]")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds after which a request is given up.")
    ] = ServeConfig.timeout,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", help=f"Holds the key that clients send. [default: ${KEY}, else none]"),
    ] = None,
    template_kwarg: TemplateFlag = None,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
    quantize: QuantizeFlag = None,
    quantize_draft: QuantizeDraftFlag = "auto",
    exact: ExactFlag = False,
) -> None:
    """Serve OpenAI's API and a page to chat on, many requests at once."""
    config = ServeConfig(host, port, max_batch, context, queue, timeout)
    key = _key(api_key_file)
    settings = template_settings(template_kwarg)
    from aquiline.serve import server

    listening = server.bind(config)
    if not config.is_local and key is None:
        note(f"warning: {host} is open to others, and there is no API key: set ${KEY}, or give --api-key-file")
    model = load_model(
        target, draft, dtype, device, settings, quantize=quantize, quantize_draft=quantize_draft, exact=exact
    )
    service = server.Service(model, config)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    address, number = listening.getsockname()[:2]
    note(f"serving at http://{f'[{address}]' if ':' in address else address}:{number}")
    sys.setswitchinterval(0.001)  # so long, at most, a handler waits while the engine is in Python, not in the kernel
    server.make_server(service, key).run([listening])
    if service.loop.dead:
        raise typer.Exit(1)


def _key(file: Path | None) -> str | None:
    """The API key, from the file or the environment."""
    if file is None:
        return os.environ.get(KEY, "").strip() or None
    try:
        key = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the API key cannot be read from {file}: {error}") from error
    require(bool(key), f"{file} holds no API key; write one into it, or leave --api-key-file out")
    return key
