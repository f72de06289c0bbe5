"""The reward `http` against a real server that misbehaves: what it does costs the rollouts it was asked about, no more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import ssl
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import trustme

from motet.config import RewardConfig
from motet.core.errors import RewardError
from motet.core.types import Message, Problem, ToolCall
from motet.hosts.messages import ScoreRequest
from motet.process.channel import encode
from motet.rewards import reward_elsewhere
from motet.rewards.reward_answers import AnswerContext, ScoreOutcome, problem_as_given
from motet.rewards.reward_elsewhere import LONGEST_TRANSCRIPT, MASK, NO_DETAILS, AnswerDetails, Chance, ScoreOrReason
from motet.rewards.reward_http import Addresses, HttpRewards, is_public
from motet.rewards.reward_pool import RewardPool
from tests.support.misbehaving_rewards import Scorer, misbehaving
from tests.support.waiting import PATIENCE

PROBLEM = Problem(7, (Message("user", "a?"),), "b", {"level": 2})
TEXTS = ["one", "three", ""]


@pytest.fixture(scope="module")
def server() -> Iterator[Scorer]:
    """One for the whole file."""
    with misbehaving() as found:
        yield found


def asked(url: str, addresses: Addresses | None = None, **fields: Any) -> list[ScoreOrReason]:
    """What an address says of `TEXTS`."""
    args = {"url": url, **fields.pop("args", {})}
    rewards = HttpRewards(addresses or Addresses(anywhere=True), **fields.pop("how", {}))
    reward = RewardConfig(name="http", args=args, **fields)
    return asyncio.run(rewards("job", reward, problem_as_given(PROBLEM), TEXTS, NO_DETAILS))


def pooled(url: str, **fields: Any) -> list[ScoreOutcome]:
    """What a job of `motet run` gets."""

    async def work() -> list[ScoreOutcome]:
        pool = RewardPool(1, {"http": HttpRewards(Addresses(anywhere=True))})
        try:
            rewards = [
                RewardConfig(name="http", weight=2.0, args={"url": url}, **fields),
                RewardConfig(name="length", args={"target": 9}),
            ]
            await pool.register("job", rewards)
            return await pool.score("job", PROBLEM, TEXTS)
        finally:
            await pool.close()

    return asyncio.run(work())


# --- what it is asked, and what it may answer ---------------------------------------------------------------------------


def test_a_group_with_long_conversations_is_sent_in_parts() -> None:
    asked_of: list[int] = []

    async def score(
        job: str, reward: RewardConfig, problem: dict[str, Any], texts: list[str], seen: AnswerDetails
    ) -> list[ScoreOrReason]:
        encode(ScoreRequest(0, job, {}, problem, texts, seen.transcripts))
        asked_of.append(len(texts))
        return [float(text) for text in texts]

    async def work() -> list[ScoreOutcome]:
        pool = RewardPool(1, {"http": score})
        try:
            await pool.register("job", [RewardConfig(name="http", args={"url": "https://example.org"})])
            talk = (Message("user", "x" * (LONGEST_TRANSCRIPT - 1000)), Message("assistant", ""))
            return await pool.score("job", PROBLEM, [str(n) for n in range(70)], AnswerContext([talk] * 70))
        finally:
            await pool.close()

    assert [one.reward for one in asyncio.run(work())] == list(range(70))
    assert asked_of == [32, 32, 6]


def test_problem_and_completions_are_posted_and_numbers_come_back(server: Scorer) -> None:
    args = {"headers": {"Authorization": "Bearer secret"}, "args": {"scale": 7.0}}
    assert asked(server.url("good"), args=args) == [3.0, 5.0, 0.0]
    path, headers, body = server.asked[-1]
    assert (path, headers["authorization"], headers["content-type"]) == ("/good", "Bearer secret", "application/json")
    messages = [{"role": "user", "content": "a?"}]
    problem = {"id": 7, "messages": messages, "answer": "b", "metadata": {"level": 2}, "conversational": False}
    assert body == {"problem": problem, "completions": TEXTS, "args": {"scale": 7.0}}
    assert asked(server.url("bools")) == [1.0, 1.0, 1.0]


def test_conversations_are_posted_as_a_function_of_ones_own_sees_them(server: Scorer) -> None:
    def seen(problem: Problem, completion: str, transcript: list[Any]) -> float:
        return float(zlib.crc32(json.dumps(transcript).encode()))

    said = Message("assistant", "<tool_call>…</tool_call>", (ToolCall("add", {"a": 2, "b": [1]}),))
    first = (*PROBLEM.messages, said, Message("tool", "3", name="add"), Message("assistant", "one"))
    long = (Message("user", "x" * LONGEST_TRANSCRIPT), Message("assistant", ""))

    async def work(transcripts: list[Any]) -> list[ScoreOutcome]:
        pool = RewardPool(1, {"http": HttpRewards(Addresses(anywhere=True))})
        try:
            http = RewardConfig(name="http", args={"url": server.url("good")})
            await pool.register("job", [http, RewardConfig(name="seen", function=seen)])
            return await pool.score("job", PROBLEM, TEXTS, AnswerContext(transcripts))
        finally:
            await pool.close()

    scored = asyncio.run(work([first, (*PROBLEM.messages, Message("assistant", "three")), long]))
    body = server.asked[-1][2]
    assert body["completions"] == TEXTS[:2]
    tool = {"role": "tool", "content": "3", "name": "add"}
    assert [message for message in body["transcripts"][0] if message["role"] == "tool"] == [tool]
    assert body["transcripts"][0][1]["tool_calls"] == [{"name": "add", "arguments": {"a": 2, "b": [1]}}]
    posted = [zlib.crc32(json.dumps(talk).encode()) for talk in body["transcripts"]]
    assert [one.parts for one in scored[:2]] == [
        {"http": n / 7, "seen": crc} for n, crc in zip((3, 5), posted, strict=True)
    ]
    assert "reward http: the conversation has 1048647 characters; the most" in scored[2].error
    alike = asyncio.run(work([]))  # of a single turn it is prompt and completion, and nothing is sent twice
    assert [one.parts["seen"] for one in alike[1:2]] == posted[1:]
    assert "transcripts" not in server.asked[-1][2]


def test_it_is_a_part_of_a_sum_like_any_other(server: Scorer) -> None:
    found = pooled(server.url("good"))
    assert [one.parts for one in found] == [{"http": n / 7, "length": 1.0} for n in (3, 5, 0)]
    assert [one.reward for one in found] == [2 * n / 7 + 1 for n in (3, 5, 0)]
    assert not any(one.clock_limited for one in found)


@pytest.mark.parametrize(
    ("way", "words", "chance"),
    [
        ("few", "2 scores for 3", False),
        ("many", "4 scores for 3", False),
        ("bare", '{"scores"', False),
        ("object", '{"scores"', False),
        ("text", "gave text", False),
        ("none", "no score", False),
        ("nan", "nan", False),
        ("infinite", "-inf", False),
        ("huge", "inf", False),
        ("html", "not JSON", False),
        ("empty", "not JSON", False),
        ("deep", "not JSON", False),
        ("gzip", "compression", False),
        ("gigabyte", "more than 1 MB", False),
        ("missing", "404: no such task", False),
        ("redirect", "redirect", False),
        ("error", "500, 3 times", True),
        ("cut", "broke the connection", True),
        ("reset", "3 times", True),
        ("hang", "0.5 s", True),
        ("slow", "0.5 s", True),
    ],
)
def test_whatever_it_does_is_a_reason(server: Scorer, way: str, words: str, chance: bool) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limit = 0.5 if way in ("hang", "slow") else 10.0
    found = asked(server.url(way), wall_seconds=limit)
    assert len(found) == len(TEXTS)
    for reason in found:
        assert isinstance(reason, str)
        assert words in reason
        assert isinstance(reason, Chance) == chance
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KB: a gigabyte never lay here
    assert server.count("GET /good") == 0


def test_only_the_completion_without_a_number_has_none(server: Scorer) -> None:
    found = asked(server.url("first"))
    assert found[:2] == [0.5, 0.5]
    assert found[2] == "gave text, not a number"
    scored = pooled(server.url("first"))
    assert [bool(one.error) for one in scored] == [False, False, True]
    assert scored[2].error == "reward http: gave text, not a number"
    assert not scored[2].clock_limited


def test_failures_that_pass_are_tried_again(server: Scorer) -> None:
    before = server.count("at_last")
    assert asked(server.url("at_last")) == [3 / 7, 5 / 7, 0.0]
    assert server.count("at_last") - before == 3
    nobody = asked("http://127.0.0.1:1/")
    assert isinstance(nobody[0], Chance)
    assert "could not be reached" in nobody[0]


def test_a_reason_of_the_clock_makes_a_job_inexact(server: Scorer) -> None:
    assert all(one.clock_limited and one.error for one in pooled(server.url("error")))
    assert all(one.clock_limited and one.error for one in pooled(server.url("hang"), wall_seconds=0.3))


def test_one_job_asks_so_many_at_a_time_and_holds_up_no_other(server: Scorer) -> None:
    async def work() -> bool:
        rewards = HttpRewards(Addresses(anywhere=True))
        hanging = RewardConfig(name="http", args={"url": server.url("hang")}, wall_seconds=3600)
        good = RewardConfig(name="http", args={"url": server.url("good")})
        calls = [asyncio.create_task(rewards("theirs", hanging, *given)) for _ in range(40)]
        async with asyncio.timeout(PATIENCE):
            while server.count("hang") - before < 16:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert server.count("hang") - before == 16
        await asyncio.gather(*(rewards("ours", good, *given) for _ in range(20)))
        held_up = not any(call.done() for call in calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return held_up

    given: tuple[Any, ...] = (problem_as_given(PROBLEM), TEXTS, NO_DETAILS)
    before = server.count("hang")
    assert asyncio.run(work()), "theirs still hang"


# --- where it may be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "localhost", "127.1", "0", "0x7f.1", "2130706433", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "[::]",
        "localhost.", "LOCALHOST",
    ],
)  # fmt: skip
def test_a_service_asks_no_private_address_however_it_is_written(server: Scorer, host: str) -> None:
    before = len(server.asked)
    said = ""
    with contextlib.suppress(RewardError):  # already where it is written as an address
        Addresses().check(server.url("good", host))
        said = str(asked(server.url("good", host), Addresses())[0])
    assert not said or "private" in said or "no address" in said
    assert len(server.asked) == before


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True), ("10.0.0.7", False),
        ("172.16.3.4", False), ("192.168.0.1", False), ("169.254.169.254", False), ("100.64.0.1", False),
        ("224.0.0.1", False), ("255.255.255.255", False), ("fe80::1", False), ("fc00::1", False), ("fec0::1", False),
        ("ff02::1", False), ("2002:7f00:1::", False), ("2002:5db8:d822::", True), ("64:ff9b::7f00:1", False),
        ("64:ff9b::5db8:d822", True), ("::ffff:10.0.0.7", False), ("2001::1", False), ("::", False),
    ],
)  # fmt: skip
def test_private_addresses_are_known_in_every_dress(address: str, public: bool) -> None:
    import ipaddress

    assert is_public(ipaddress.ip_address(address)) == public


class Names:
    """Names that mean another address each time they are looked up."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.looked = list(answers), 0

    async def __call__(self, host: str, port: int) -> list[str]:
        """The next answer; the last one stays."""
        self.looked += 1
        return [self.answers[min(self.looked, len(self.answers)) - 1]]


class Several:
    """A name with several addresses."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)

    async def __call__(self, host: str, port: int) -> list[str]:
        """All of them."""
        return self.addresses


def test_a_job_whose_names_do_not_resolve_keeps_few_threads(server: Scorer) -> None:
    answers, looked = threading.Event(), 0

    async def resolve(host: str, port: int) -> list[str]:
        nonlocal looked
        looked += 1
        await asyncio.get_running_loop().run_in_executor(threads, answers.wait)
        return ["127.0.0.1"]

    async def work() -> None:
        rewards = HttpRewards(Addresses(("scores.example",)), resolve)
        args = {"url": server.url("good", "scores.example")}
        given: tuple[Any, ...] = (problem_as_given(PROBLEM), TEXTS, NO_DETAILS)
        short, long = (RewardConfig(name="http", args=args, wall_seconds=seconds) for seconds in (0.1, 600))
        for _ in range(6):
            assert isinstance((await rewards("job", short, *given))[0], Chance)
        assert looked == 2
        await rewards("other", short, *given)
        assert looked == 3
        answers.set()
        assert await rewards("job", long, *given) == [3 / 7, 5 / 7, 0.0]

    with ThreadPoolExecutor(9) as threads:
        try:
            asyncio.run(work())
        finally:
            answers.set()


def test_the_connection_goes_to_the_address_that_was_looked_at(server: Scorer) -> None:
    names = Names("127.0.0.1", "192.0.2.1")  # a second lookup would lead nowhere
    url = server.url("good", "scores.example")
    assert asked(url, Addresses(("scores.example",)), how={"resolve": names}) == [3 / 7, 5 / 7, 0.0]
    assert names.looked == 1
    assert server.asked[-1][1]["host"] == f"scores.example:{server.port}"
    both = Several("127.0.0.2", "127.0.0.1")
    assert asked(url, Addresses(("scores.example",)), how={"resolve": both}) == [3 / 7, 5 / 7, 0.0]
    before = len(server.asked)
    private = asked(url, Addresses(), how={"resolve": Names("10.0.0.7")})
    assert "private" in str(private[0])
    mixed = asked(url, Addresses(), how={"resolve": Several("93.184.216.34", "127.0.0.1")})
    assert "private" in str(mixed[0])
    assert len(server.asked) == before


def test_only_listed_hosts_are_asked_where_there_is_a_list(server: Scorer) -> None:
    listed = Addresses(("*.example.org", f"127.0.0.1:{server.port}"))
    assert asked(server.url("good"), listed) == [3 / 7, 5 / 7, 0.0]
    assert "not among" in str(asked("http://127.0.0.1:1/", listed)[0])
    for good in ("https://a.example.org/x", "http://A.Example.ORG:81"):
        listed.check(good)
    for bad in ("http://example.org", "http://example.org.evil.test", "http://127.0.0.1:1"):
        with pytest.raises(RewardError, match="does not ask"):
            listed.check(bad)
    with pytest.raises(RewardError, match="none"):
        Addresses(()).check("https://example.com")


def test_certificates_are_those_of_the_name() -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("scores.example").configure_cert(context)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    with misbehaving(context) as server:
        how = {"resolve": Names("127.0.0.1"), "trust": trust}
        good = asked(server.url("good", "scores.example"), Addresses(("*",)), how=how)
        assert good == [3 / 7, 5 / 7, 0.0]
        bad = asked(server.url("good", "other.example"), Addresses(("*",)), how=how)
        assert "certificate" in str(bad[0]).lower()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "url: is missing"),
        ({"url": "ftp://example.org"}, "https://example.org/score"),
        ({"url": "file:///etc/passwd"}, "https://example.org/score"),
        ({"url": "http://"}, "https://example.org/score"),
        ({"url": "http://[::1"}, "https://example.org/score"),
        ({"url": "http://\ufffd/"}, "https://example.org/score"),
        ({"url": "http://a:99999/"}, "https://example.org/score"),
        ({"url": "http://a/\nb"}, "https://example.org/score"),
        ({"url": "http://me:secret@example.org"}, "header"),
        ({"url": "http://a", "headers": {"Host": "b"}}, "'Host'"),
        ({"url": "http://a", "headers": {"X y": "b"}}, "'X y'"),
        ({"url": "http://a", "headers": {"X": "b\r\nY: c"}}, "X"),
        ({"url": "http://a", "headers": {"X": MASK}}, "mask"),
        ({"url": "http://a", "timeout": 3}, "url, headers, args"),
    ],
)
def test_arguments_that_cannot_work_are_refused(args: dict[str, Any], words: str) -> None:
    with pytest.raises(RewardError) as error:
        reward_elsewhere.check(RewardConfig(name="http", args=args))
    assert words in str(error.value)


@pytest.mark.parametrize("name", ["worker", "judge"])
def test_motet_run_says_what_only_a_service_has(name: str) -> None:
    async def work() -> None:
        pool = RewardPool(1, {"http": HttpRewards(Addresses(anywhere=True))})
        await pool.register("job", [RewardConfig(name=name)])

    with pytest.raises(RewardError, match="motet serve"):
        asyncio.run(work())
