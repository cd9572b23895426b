"""A real server on this machine, in a thread, for as long as a test needs one."""

import contextlib
import threading
import time
from collections.abc import Iterator

from aquiline.api import Model
from aquiline.config import ServeConfig
from aquiline.serve.server import Service, bind, make_server


@contextlib.contextmanager
def live(model: Model, key: str | None = None, **settings) -> Iterator[str]:
    """Its address. `settings` are those of ServeConfig."""
    config = ServeConfig(port=0, **settings)
    listening = bind(config)
    server = make_server(Service(model, config), key)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"
