"""The control of an inference engine, from the trainer: over vLLM's HTTP routes, or of an engine in the same program."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from typing import Any, Literal, Protocol

from .._errors import FailedPreconditionError, InvalidArgumentError, UnavailableError

PauseMode = Literal["abort", "wait", "keep"]


class Client(Protocol):
    """One engine. vLLM's own clients have the first four methods; what others an object lacks is not called."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Returns when the update has been made: called on a thread of its own."""

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class HTTPClient:
    """An engine behind ``vllm serve`` (started with VLLM_SERVER_DEV_MODE=1).

    Args:
        base_url: "http://host:8000", without a path.
        timeout: seconds that one call may take.
        pause_mode: what becomes of requests that run when an update begins: "abort", "wait" for their end, or "keep" them
            and go on afterwards; what they have computed so far is computed again with the new weights.
    """

    def __init__(self, base_url: str, *, timeout: float = 600.0, pause_mode: PauseMode = "abort") -> None:
        if not base_url.startswith(("http://", "https://")):
            raise InvalidArgumentError(f"base_url must begin with http:// or https://, not {base_url!r}")
        self._base_url = base_url.rstrip("/")
        self._timeout = timeout
        self._pause_mode = pause_mode

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("POST", "init_weight_transfer_engine", {"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        self._call("POST", "shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        self._call("POST", "start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("POST", "update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("POST", "finish_weight_update", None if weight_version is None else {"weight_version": weight_version})

    def pause(self) -> None:
        self._call("POST", f"pause?mode={self._pause_mode}&clear_cache=true")

    def resume(self) -> None:
        self._call("POST", "resume")

    def reset_prefix_cache(self) -> None:
        """What was computed with the old weights is not to be found again."""
        answer = self._call("POST", "reset_prefix_cache?reset_running_requests=true&reset_external=true")
        if not answer.get("success"):
            raise FailedPreconditionError(f"{self._base_url}: the prefix cache could not be reset: {answer}", fault="peer")

    def world_size(self) -> int:
        """Its workers."""
        return int(self._ask("get_world_size", "world_size"))

    def is_paused(self) -> bool:
        return bool(self._ask("is_paused", "is_paused"))

    def weight_version(self) -> str:
        return str(self._ask("weight_info", "weight_version"))

    def _ask(self, path: str, name: str) -> Any:
        answer = self._call("GET", path)
        if name not in answer:
            raise FailedPreconditionError(f"GET {self._base_url}/{path}: no '{name}' in the answer: is it a server of vLLM's?", fault="peer")
        return answer[name]

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._base_url}/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        where = f"{method} {self._base_url}/{path}"
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                answer = json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            hint = " (is VLLM_SERVER_DEV_MODE=1 set there, and is base_url without a path?)" if error.code == 404 else ""
            said = _said(error.read().decode(errors="replace"))
            raise FailedPreconditionError(f"{where}: {error.code} {error.reason}{hint}: {said}", fault="peer") from error
        except ValueError as error:
            raise FailedPreconditionError(f"{where}: the answer is no JSON: is it a server of vLLM's?", fault="peer") from error
        except (OSError, http.client.HTTPException) as error:
            why = error.reason if isinstance(error, urllib.error.URLError) else error
            raise UnavailableError(f"{where}: {why}: does the engine run there, and has it started?", fault="peer") from error
        return answer if isinstance(answer, dict) else {}


def _said(body: str) -> str:
    """What a worker raised, out of what vLLM's layers have put around it; else all of it."""
    found = re.search(r"Worker failed with error '(.*)', please check the stack trace", body, re.DOTALL)
    return f"a worker says: {found[1]}" if found else body


class OfflineClient:
    """An engine in this program: a ``vllm.LLM``, which nothing else is asked of while an update is made.

    With requests that have not ended, ``send_weights`` raises FailedPreconditionError, and nothing has changed.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        self._llm.shutdown_weight_transfer_engine()

    def pause(self) -> None:
        """It runs only as it is asked to: there is nothing to pause, and no way to pause what runs."""
        running = self._llm.llm_engine.get_num_unfinished_requests()
        if running:
            raise FailedPreconditionError(f"the engine has {running} requests that have not ended: an update would change their weights under them")

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)

    def reset_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise FailedPreconditionError("the engine's prefix cache could not be reset")

    def world_size(self) -> int:
        return int(self._llm.llm_engine.vllm_config.parallel_config.world_size_across_dp)
