"""The synchronous client. It runs the asynchronous client in a thread."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import ExitStack
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from anyio.from_thread import start_blocking_portal

from motet.client.asynchronous import AsyncClient
from motet.core.errors import MotetError

P = ParamSpec("P")
T = TypeVar("T")
_END: Any = object()


def _waits(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """A synchronous version of a coroutine method."""

    @functools.wraps(method)
    def wait(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(functools.partial(method, self._client, *args, **kwargs))

    return wait


def _yields(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Client, P], Generator[T, None, None]]:
    """A synchronous version of an asynchronous generator method."""

    @functools.wraps(method)
    def iterate(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        items = method(self._client, *args, **kwargs)
        try:
            while (item := self._run(functools.partial(_next, items))) is not _END:
                yield item
        except GeneratorExit:
            if self._close.alive:  # otherwise the end of the thread has closed them
                self._run(items.aclose)
            raise

    signature = inspect.signature(method)
    answer = str(signature.return_annotation).removeprefix("Async")
    iterate.__signature__ = signature.replace(return_annotation=answer)  # type: ignore[attr-defined]
    return iterate


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items, _END)


class Client:
    """A client of a service that waits for each answer."""

    submit = _waits(AsyncClient.submit)
    submit_all = _waits(AsyncClient.submit_all)
    job = _waits(AsyncClient.job)
    jobs = _yields(AsyncClient.jobs)
    pause = _waits(AsyncClient.pause)
    resume = _waits(AsyncClient.resume)
    cancel = _waits(AsyncClient.cancel)
    change = _waits(AsyncClient.change)
    delete = _waits(AsyncClient.delete)
    versions = _waits(AsyncClient.versions)
    rollouts = _waits(AsyncClient.rollouts)
    steps = _waits(AsyncClient.steps)
    events = _yields(AsyncClient.events)
    check = _waits(AsyncClient.check)
    upload = _waits(AsyncClient.upload)
    files = _waits(AsyncClient.files)
    delete_file = _waits(AsyncClient.delete_file)
    models = _waits(AsyncClient.models)
    model = _waits(AsyncClient.model)
    chat = _yields(AsyncClient.chat)
    rewards = _waits(AsyncClient.rewards)
    score = _waits(AsyncClient.score)
    run_agent = _waits(AsyncClient.run_agent)
    health = _waits(AsyncClient.health)
    push = _waits(AsyncClient.push)
    pull = _waits(AsyncClient.pull)
    adapters = _waits(AsyncClient.adapters)
    adapter = _waits(AsyncClient.adapter)
    delete_adapter = _waits(AsyncClient.delete_adapter)
    share = _waits(AsyncClient.share)
    shares = _waits(AsyncClient.shares)
    unshare = _waits(AsyncClient.unshare)
    me = _waits(AsyncClient.me)
    sign_in = _waits(AsyncClient.sign_in)
    sign_out = _waits(AsyncClient.sign_out)
    create_key = _waits(AsyncClient.create_key)
    keys = _waits(AsyncClient.keys)
    revoke_key = _waits(AsyncClient.revoke_key)
    rotate_key = _waits(AsyncClient.rotate_key)
    usage = _waits(AsyncClient.usage)
    usage_csv = _waits(AsyncClient.usage_csv)
    limits = _waits(AsyncClient.limits)
    tenants = _waits(AsyncClient.tenants)
    set_limits = _waits(AsyncClient.set_limits)
    erase_tenant = _waits(AsyncClient.erase_tenant)
    audit = _yields(AsyncClient.audit)

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        """Connects to nothing yet; see `AsyncClient`."""
        self._client = AsyncClient(url, key)
        self.url = self._client.url
        opened = ExitStack()
        self._portal = opened.enter_context(start_blocking_portal())
        opened.callback(self._portal.call, self._client.close)
        self._close = weakref.finalize(self, opened.close)  # also if nobody closes it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._close()

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        future = self._portal.start_task_soon(work)
        try:
            result: T = future.result()
        except MotetError as error:
            raise error.with_traceback(None) from None
        except BaseException:
            future.cancel()  # after Ctrl-C, work in the thread ends too
            raise
        return result
