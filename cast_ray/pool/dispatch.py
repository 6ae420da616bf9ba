"""The dispatcher: a queue of rows in front of several engines, in one asyncio loop. It does not know Ray.

Rows stay in the queue until an engine has room, so a fast engine simply takes more of them, and the last ones wait for
a fast engine rather than start on a slow one. When an engine dies, the rows aboard are suspects: one of them may have
killed it. A suspect is retried with no other suspect beside it, and for the last time with no other row at all. So a
row that is given up went down with an engine that it had for itself, and its neighbours are always answered. An engine
that holds rows and makes no progress is ended, which is a death like another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cast_ray.errors import EngineError
from cast_ray.pool.hang import HangWatch
from cast_ray.pool.routing import EngineLoad, TokenEstimate, better_held, choose
from cast_ray.pool.rows import RowAnswer, RowRequest

START_GRACE_S = 0.5


class EnginePort(Protocol):
    """One engine as the dispatcher sees it."""

    name: str
    slots: int

    async def ready(self) -> None:
        """Return when the engine can take rows (again). Raises when it never will."""
        ...

    async def generate(self, rows: list[RowRequest]) -> list[RowAnswer]:
        """Raises when the engine died with the rows aboard."""
        ...

    async def pulse(self) -> int:
        """A number that changes whenever the engine has done some work. May raise, or not return, when it is ill."""
        ...

    async def end(self) -> None:
        """End the engine's process; its calls then raise, and `ready` waits for the next one."""
        ...


@dataclass
class _Ticket:
    row: RowRequest
    answer: asyncio.Future[RowAnswer]
    deaths: int = 0


@dataclass
class _Member:
    port: EnginePort
    load: EngineLoad
    unit: int
    up: bool = False
    gone: str | None = None
    suspect_aboard: bool = False
    draining: bool = False  # let run empty for a last try
    alone: bool = False  # a row on its last try is aboard
    life: int = 0
    hung: str | None = None  # why it was ended, until it is up again
    calls: set[asyncio.Task[None]] = field(default_factory=set)


class Dispatcher:
    """Answers rows with the engines behind `ports`. Use from one event loop only."""

    def __init__(self, ports: Sequence[EnginePort], max_deaths: int = 3, hang_timeout_s: float | None = None) -> None:
        # A call carries a few rows: enough to spread its cost, few enough that slots free up one after the other.
        self._members = [_Member(port, EngineLoad(port.slots), max(1, port.slots // 8)) for port in ports]
        self._max_deaths = max_deaths
        self._hang_timeout_s = hang_timeout_s
        self._queue: deque[_Ticket] = deque()
        self._suspects: deque[_Ticket] = deque()
        self._last_tries: deque[_Ticket] = deque()
        self._estimate = TokenEstimate()
        self._start: asyncio.Task[None] | None = None
        self._begun = False
        self._watches: set[asyncio.Task[None]] = set()

    async def generate(self, rows: Sequence[RowRequest]) -> list[RowAnswer]:
        """Answers in the order of rows, whatever happens to single rows or engines.

        Raises EngineError once no engine is left, with the last cause.
        """
        loop = asyncio.get_running_loop()
        if self._start is None:
            self._start = loop.create_task(self._begin())
        tickets = [_Ticket(row, loop.create_future()) for row in rows]
        self._queue.extend(tickets)
        self._pump()
        return list(await asyncio.gather(*(ticket.answer for ticket in tickets)))

    async def _begin(self) -> None:
        """Ask the engines whether they are ready. Those that are say so within moments, and none is to get the first
        rows of all only because it answered first."""
        for member in self._members:
            self._spawn(member, self._revive(member))
        revivals = [call for member in self._members for call in member.calls]
        if self._hang_timeout_s is not None:
            for member in self._members:
                self._watches.add(asyncio.get_running_loop().create_task(self._watch(member, self._hang_timeout_s)))
        await asyncio.wait(revivals, timeout=START_GRACE_S)
        self._begun = True
        self._pump()

    def _pump(self) -> None:
        """Send what can be sent: last tries to empty engines, suspects one an engine, then rows in their order."""
        if not self._begun:
            return
        self._pump_last_tries()
        while self._suspects and (free := [m for m in self._open() if not m.suspect_aboard]):
            self._send(free, [self._suspects.popleft()])
        while self._queue and (free := self._open()):
            index = choose([m.load for m in free], self._cost(self._queue[0]))
            assert index is not None
            member = free[index]
            others = [m.load for m in self._members if m.up and m is not member]
            cost = self._cost(self._queue[0])
            if better_held(member.load, others, cost, cost * len(self._queue)):
                break
            # The last rows are spread over the engines rather than sent as full units.
            count = min(member.unit, member.load.free, max(1, len(self._queue) // len(free)))
            self._send([member], [self._queue.popleft() for _ in range(count)])
        if all(member.gone for member in self._members):
            self._give_up()

    def _open(self) -> list[_Member]:
        return [m for m in self._members if m.up and m.load.free and not m.draining and not m.alone]

    def _pump_last_tries(self) -> None:
        while self._last_tries and (empty := [m for m in self._members if m.up and not m.load.rows]):
            empty[0].draining, empty[0].alone = False, True
            self._send(empty[:1], [self._last_tries.popleft()])
        # In the middle of a job no engine is empty by itself: one is let run empty, until nothing waits for it.
        up = [m for m in self._members if m.up]
        if not self._last_tries:
            for member in up:
                member.draining = False
        elif up and not any(m.draining or m.alone for m in up):
            min(up, key=lambda m: m.load.rows).draining = True

    def _cost(self, ticket: _Ticket) -> float:
        return self._estimate.expect(ticket.row.params.max_tokens)

    def _send(self, candidates: list[_Member], tickets: list[_Ticket]) -> None:
        cost = sum(self._cost(ticket) for ticket in tickets)
        index = choose([m.load for m in candidates], cost)
        assert index is not None
        member = candidates[index]
        member.load.meter.advance(_now(), busy=member.load.rows > 0)
        member.load.rows += len(tickets)
        member.load.tokens += cost
        if tickets[0].deaths:
            member.suspect_aboard = True
        self._spawn(member, self._call(member, tickets, cost, member.life))

    def _spawn(self, member: _Member, work: Coroutine[Any, Any, None]) -> None:
        # Held, or the loop could collect it before it ends.
        task = asyncio.get_running_loop().create_task(work)
        member.calls.add(task)
        task.add_done_callback(member.calls.discard)

    async def _call(self, member: _Member, tickets: list[_Ticket], cost: float, life: int) -> None:
        answers: list[RowAnswer] | None = None
        try:
            answers = await member.port.generate([ticket.row for ticket in tickets])
        except Exception as error:
            self._lost(member, tickets, error, life)
        tokens = sum(answer.num_generated_tokens or 0 for answer in answers or ())
        member.load.meter.advance(_now(), busy=True, tokens=tokens)
        member.load.rows -= len(tickets)
        member.load.finished += len(answers or ())
        member.load.tokens = max(0.0, member.load.tokens - cost)
        if tickets[0].deaths and member.life == life:
            member.suspect_aboard = member.alone = False
        for ticket, answer in zip(tickets, answers or (), strict=False):
            if answer.num_generated_tokens is not None:
                self._estimate.observe(answer.num_generated_tokens)
            _settle(ticket, answer)
        self._pump()

    def _lost(self, member: _Member, tickets: list[_Ticket], error: Exception, life: int) -> None:
        """The engine died with these rows aboard. Its other calls fail too; the first to fail starts the revival."""
        if member.life == life:
            member.life += 1
            member.up = False
            member.suspect_aboard = member.draining = member.alone = False
            self._spawn(member, self._revive(member))
        for ticket in tickets:
            ticket.deaths += 1
            if ticket.deaths < self._max_deaths - 1:
                self._suspects.append(ticket)
            elif ticket.deaths < self._max_deaths:
                self._last_tries.append(ticket)
            else:
                cause = member.hung or short_cause(error)
                problem = f"{ticket.deaths} engines died while they held this row; the last: {cause}"
                _settle(ticket, RowAnswer.failed("EngineDied", problem))

    async def _revive(self, member: _Member) -> None:
        try:
            await member.port.ready()
        except Exception as error:
            member.gone = member.hung or short_cause(error)
        else:
            member.up, member.hung = True, None
        self._pump()

    async def _watch(self, member: _Member, timeout_s: float) -> None:
        """End the engine whenever it holds rows and makes no progress for that long."""
        watch = HangWatch(timeout_s)
        while member.gone is None:
            await asyncio.sleep(watch.interval_s)
            if not (member.up and member.load.rows):
                watch.idle()
            elif await watch.hangs(member.port.pulse, (member.life, member.load.finished), _now):
                member.hung = f"made no progress for {timeout_s:g} s with {member.load.rows} rows aboard (hang)"
                await member.port.end()
                watch.idle()

    def _give_up(self) -> None:
        causes = "; ".join(f"{member.port.name}: {member.gone}" for member in self._members)
        error = EngineError(f"no engine is left ({causes}). See the Ray logs of those actors, then run the job again")
        for waiting in (self._last_tries, self._suspects, self._queue):
            while waiting:
                if not (ticket := waiting.popleft()).answer.done():
                    ticket.answer.set_exception(error)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _settle(ticket: _Ticket, answer: RowAnswer) -> None:
    if not ticket.answer.done():
        ticket.answer.set_result(answer)


def short_cause(error: BaseException) -> str:
    """One line on an exception that came through Ray: the original error where there is one."""
    original = getattr(error, "cause", None)
    if isinstance(original, BaseException):
        error = original
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Ray puts identifiers on lines of their own between the summary and the reason.
    text = " ".join(
        line for line in lines if not line.startswith(("class_name:", "actor_id:", "pid:", "namespace:", "ip:"))
    )
    text = text.split(" Some common causes include", 1)[0]
    if len(text) > 400:
        text = text[:397] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
