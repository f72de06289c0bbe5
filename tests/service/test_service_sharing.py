"""Uploaded adapters, shares, and who changed what: the routes without an engine."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import socket
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from motet.core.errors import DataError
from motet.core.types import ADAPTER_CONFIG, ADAPTER_FILES, ADAPTER_WEIGHTS, JobState
from motet.hosts.hosts import Hosts
from motet.hosts.messages import JobStanding
from motet.service.adapters.adapters import Adapters
from motet.service.adapters.archive import MOST_MEMBERS, pack, unpack
from motet.service.database.tables import UploadedAdapter, new_id
from motet.service.settings import Settings
from tests.support.adapter_files import link, tarred
from tests.support.house import House, error_of, open_house
from tests.support.service_run import ROWS, Json, tiny
from tests.support.waiting import PATIENCE

HAS: Json = {ADAPTER_CONFIG: b"{}", ADAPTER_WEIGHTS: b"weights"}
EMPTY: Json = {ADAPTER_CONFIG: b"{}", ADAPTER_WEIGHTS: (2).to_bytes(8, "little") + b"{}"}


@pytest.fixture(scope="module")
def house(house: House) -> House:
    """With a third tenant."""
    _, house.keys["third"] = house.store.tenants.create_key("third", "third", "member")
    return house


# --- archives ---------------------------------------------------------------------------------------------------------------


def zipped(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return packed.getvalue()


@pytest.fixture
def take(tmp_path: Path) -> Callable[[bytes], int]:
    """Unpack bytes; nothing is written but the two files, whatever happens."""
    inside = tmp_path / "inside"
    inside.mkdir()

    def unpacked(data: bytes) -> int:
        (tmp_path / "archive").write_bytes(data)
        try:
            return unpack(tmp_path / "archive", inside, 2**20)
        finally:
            assert {path.name for path in inside.iterdir()} <= set(ADAPTER_FILES)
            assert {path.name for path in tmp_path.iterdir()} == {"archive", "inside"}
            assert not any(path.is_symlink() for path in inside.iterdir())

    return unpacked


@pytest.mark.parametrize("made", [tarred, zipped])
@pytest.mark.parametrize("place", ["", "./", "adapter/", "a b/"])
def test_an_adapter_comes_out_of_an_archive(
    take: Callable[[bytes], int], made: Callable[[dict[str, bytes]], bytes], place: str, tmp_path: Path
) -> None:
    files = {f"{place}{name}": data for name, data in HAS.items()}
    assert take(made({**files, f"{place}README.md": b"words", "other/deep/adapter_config.json": b"no"})) == 9
    assert {path.name: path.read_bytes() for path in (tmp_path / "inside").iterdir()} == HAS


def test_what_is_packed_can_be_unpacked(take: Callable[[bytes], int], tmp_path: Path) -> None:
    for name, data in HAS.items():
        (tmp_path / "inside" / name).write_bytes(data)
    assert take(pack(tmp_path / "inside", "sort-v1")) == 9


LONG_NAME = tarfile.TarInfo("a" * 100)
LONG_NAME.pax_headers = {"comment": "x" * 2**20}
MANY = {f"{number}": b"" for number in range(MOST_MEMBERS + 1)}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (lambda: b"", "neither"),
        (lambda: b"hello", "neither"),
        (lambda: b"PK\x03\x04" + b"x" * 100, "damaged"),
        (lambda: b"\x1f\x8b" + b"x" * 100, "damaged"),
        (lambda: tarred(HAS)[:-20], "damaged"),
        (lambda: gzip.compress(b"x" * 10_000), "damaged"),
        (lambda: tarred({ADAPTER_CONFIG: b"{}"}), ADAPTER_WEIGHTS),
        (lambda: zipped({ADAPTER_WEIGHTS: b"x"}), ADAPTER_CONFIG),
        (lambda: tarred({f"../{ADAPTER_CONFIG}": b"{}", ADAPTER_WEIGHTS: b"x"}), "outside"),
        (lambda: tarred({f"/tmp/{ADAPTER_CONFIG}": b"{}", ADAPTER_WEIGHTS: b"x"}), "outside"),
        (lambda: zipped({f"../{ADAPTER_CONFIG}": b"{}", ADAPTER_WEIGHTS: b"x"}), "outside"),
        (lambda: zipped({f"..\\{ADAPTER_CONFIG}": b"{}", ADAPTER_WEIGHTS: b"x"}), "outside"),
        (lambda: tarred({"a/" + ADAPTER_CONFIG: b"{}", "b/" + ADAPTER_WEIGHTS: b"x"}), "more than one"),
        (lambda: zipped({"a/" + ADAPTER_CONFIG: b"{}", ADAPTER_CONFIG: b"{}"}), "more than one"),
        (lambda: tarred({}, link(ADAPTER_CONFIG, "/etc/passwd")), "neither a file nor"),
        (lambda: tarred({ADAPTER_WEIGHTS: b"x"}, link("x", "/etc")), "neither a file nor"),
        (lambda: tarred({ADAPTER_CONFIG: b"{}", ADAPTER_WEIGHTS: b"0" * (2**20 + 1)}), "too large"),
        (lambda: zipped({ADAPTER_CONFIG: b"{}", ADAPTER_WEIGHTS: b"0" * (2**20 + 1)}), "too large"),
        (lambda: zipped({ADAPTER_CONFIG: b"0" * (2**20 + 1), ADAPTER_WEIGHTS: b"x"}), "too large"),
        (lambda: tarred({"skipped": b"0" * 2**28, **HAS}), "too large"),
        (lambda: tarred(MANY), "members"),
        (lambda: zipped(MANY), "members"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_an_archive_that_is_no_adapters_is_refused(
    take: Callable[[bytes], int], data: Callable[[], bytes], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        take(data())


def test_headers_of_an_archive_are_bounded(take: Callable[[bytes], int]) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo(ADAPTER_CONFIG)
        member.pax_headers = {"comment": "x" * 2**18}
        archive.addfile(member)
    with pytest.raises(DataError, match="name is too long"):
        take(packed.getvalue())


def test_a_zip_that_says_it_is_longer_is_refused(take: Callable[[bytes], int]) -> None:
    whole = zipped(HAS)
    place = whole.rindex(b"PK\x05\x06")
    many = whole[:place] + whole[place:].replace(struct.pack("<2H", 2, 2), struct.pack("<2H", 65535, 65535))
    with pytest.raises(DataError, match="members"):
        take(many)
    far = whole[:place] + b"PK\x06\x07" + bytes(16) + whole[place:]
    with pytest.raises(DataError, match="members"):
        take(far)


def test_a_zip_is_of_kinds_that_unpack_piece_by_piece(take: Callable[[bytes], int]) -> None:
    for kind, good in (
        (zipfile.ZIP_STORED, True), (zipfile.ZIP_DEFLATED, True), (zipfile.ZIP_BZIP2, False), (zipfile.ZIP_LZMA, False),
    ):  # fmt: skip
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", kind) as archive:
            for name, data in HAS.items():
                archive.writestr(name, data)
        if good:
            assert take(packed.getvalue()) == 9
            continue
        with pytest.raises(DataError, match="use deflate"):
            take(packed.getvalue())


def test_the_list_of_a_zips_members_is_bounded(take: Callable[[bytes], int]) -> None:
    names = [f"{number}".zfill(60_000) for number in range(20)]
    with pytest.raises(DataError, match="long names"):
        take(zipped({**HAS, **dict.fromkeys(names, b"")}))


def sparse(kind: str) -> bytes:
    """A .tar.gz with a member that has holes, in one of the ways in which that is written."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo(ADAPTER_WEIGHTS)
        member.pax_headers = {
            "0.0": {"GNU.sparse.size": "9", "GNU.sparse.numblocks": "1"},
            "0.1": {"GNU.sparse.map": "0,1,5", "GNU.sparse.size": "9"},
            "1.0": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"},
            "old": {},
        }[kind]
        member.type = tarfile.GNUTYPE_SPARSE if kind == "old" else tarfile.REGTYPE
        content = b"9" * 512
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


@pytest.mark.parametrize("kind", ["0.0", "0.1", "1.0", "old"])
def test_sparse_members_are_refused(take: Callable[[bytes], int], kind: str) -> None:
    with pytest.raises(DataError, match="sparse"):
        take(sparse(kind))


def test_a_download_lies_in_no_file_and_in_no_memory(house: House) -> None:
    answer = house.ask("GET", "/v1/adapters/brought/download")
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert set(taken(house, "brought")) == {f"brought/{name}" for name in ADAPTER_FILES}
    directory = house.storage.directory
    assert not [path for path in directory.iterdir() if path.name.startswith("tmp")]


# --- uploads ----------------------------------------------------------------------------------------------------------------


def test_an_upload_waits_for_an_engine_that_can_look_at_it(house: House) -> None:
    before = sorted(house.storage.adapters.iterdir())
    for status, data, words in (
        (503, tarred(EMPTY), "engine"),
        (400, tarred(HAS), "is no adapter"),
        (400, b"hello", "neither"),
        (413, tarred({ADAPTER_CONFIG: b"{}", ADAPTER_WEIGHTS: b"0" * 600_000}), "MB"),
    ):
        settings = house.part(Settings).config
        object.__setattr__(settings, "max_adapter_mb", 0.5)
        error = house.refused(status, "POST", "/v1/adapters", files={"file": ("a.tar.gz", data)})
        assert words in error["message"]
        assert str(house.storage.directory) not in error["message"]
        assert sorted(house.storage.adapters.iterdir()) == before
    house.refused(422, "POST", "/v1/adapters?name=..", files={"file": ("a.tar.gz", tarred(HAS))})


def test_an_uploaded_adapter_is_its_tenants(house: House) -> None:
    brought, _ = sorted(house.ask("GET", "/v1/adapters").json()["data"], key=lambda one: str(one["name"]))
    assert (brought["name"], brought["rank"], brought["target_modules"]) == ("brought", 32, ["q_proj"])
    assert house.ask("GET", "/v1/adapters/brought").json() == brought
    assert house.ask("GET", f"/v1/adapters/{brought['id']}").json() == brought
    assert house.ask("GET", "/v1/adapters", "theirs").json()["data"] == []
    assert set(taken(house, "brought")) == {f"brought/{name}" for name in ADAPTER_FILES}
    assert "brought" in {one["id"] for one in house.ask("GET", "/v1/models").json()["data"]}
    house.refused(404, "GET", "/v1/adapters/brought@best/download")  # it has no versions
    for name in ("brought", brought["id"], "us/brought"):
        for method, path in (("GET", f"/v1/adapters/{name}/download"), ("DELETE", f"/v1/adapters/{name}")):
            house.refused(404, method, path, "theirs")
    assert house.ask("GET", f"/v1/adapters/{brought['id']}", "admin").status_code == 200


def test_names_of_jobs_and_adapters_are_one_space(house: House) -> None:
    assert "lent" in house.refused(409, "POST", "/v1/jobs", json=tiny("lent"))["message"]
    assert house.ask("POST", "/v1/jobs", "theirs", json=tiny("lent")).status_code == 201
    who = house.store.tenants.who(house.keys["ours"])
    assert who is not None
    row = UploadedAdapter(
        id=new_id("adapter"), tenant_id=who.tenant_id, name="ended", bytes=1, rank=1, alpha=1.0, target_modules=[]
    )
    with pytest.raises(Exception, match="ended"):
        house.part(Adapters).add(who, row)


# --- shares -----------------------------------------------------------------------------------------------------------------


def taken(house: House, name: str, key: str = "ours") -> list[str]:
    """Members of a downloaded adapter."""
    answer = house.ask("GET", f"/v1/adapters/{name}/download", key)
    assert answer.status_code == 200, answer.text
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        return archive.getnames()


def uses(house: House, name: str, key: str) -> list[int]:
    """What a tenant gets who takes an adapter home, asks it, and starts from it."""
    asked = {"model": name, "messages": [{"role": "user", "content": "a"}]}
    job = {**tiny(f"from-{new_id('x')}"), "adapter": {"init": name}}
    return [
        house.ask("GET", f"/v1/adapters/{name}/download", key).status_code,
        house.ask("POST", "/v1/chat/completions", key, json=asked).status_code,
        house.ask("POST", "/v1/jobs", key, json=job).status_code,
    ]


NOT_THERE, THERE = [404, 404, 400], [200, 503, 201]  # there is no engine here that could answer


@pytest.mark.parametrize("name", ["ended", "brought"])
def test_what_is_shared_can_be_used_and_nothing_else_is_seen(house: House, name: str) -> None:
    theirs = f"us/{name}" if name == "brought" else "us/ended@best"
    assert uses(house, theirs, "theirs") == NOT_THERE
    shared = house.ask("POST", "/v1/shares", json={"name": name, "tenant": "them"})
    assert shared.status_code == 201, shared.text
    again = house.ask("POST", "/v1/shares", json={"name": name, "tenant": "them"})
    assert again.json()["id"] == shared.json()["id"]
    assert uses(house, theirs, "theirs") == THERE
    assert uses(house, theirs, "third") == NOT_THERE
    assert uses(house, theirs, "admin") == THERE
    assert uses(house, name, "theirs")[0] == 404  # only under its owner's name
    models = {one["id"] for one in house.ask("GET", "/v1/models", "theirs").json()["data"]}
    assert theirs in models
    assert not [one for one in models if one.startswith("us/") and name not in one]
    listed = house.ask("GET", "/v1/shares", "theirs").json()
    assert [one["id"] for one in listed["received"]] == [shared.json()["id"]]
    assert listed["given"] == []
    assert theirs in listed["received"][0]["models"]
    assert house.ask("GET", "/v1/shares", "third").json() == {"given": [], "received": [], "next": None}
    for path in ("", "/events", "/rollouts", "/versions", "/versions/best/download"):
        house.refused(404, "GET", f"/v1/jobs/{house.job['id']}{path}", "theirs")
    house.refused(404, "DELETE", f"/v1/shares/{shared.json()['id']}", "theirs")
    house.refused(404, "POST", "/v1/shares", "theirs", json={"name": name, "tenant": "third"})
    house.refused(404, "POST", "/v1/shares", "theirs", json={"name": theirs, "tenant": "third"})
    assert house.ask("DELETE", f"/v1/shares/{shared.json()['id']}").status_code == 204
    assert uses(house, theirs, "theirs") == NOT_THERE


def test_what_is_shared_with_all_is_for_all(house: House) -> None:
    share = house.ask("POST", "/v1/shares", json={"name": "ended", "tenant": "*"}).json()
    assert share["tenant"] == "*"
    for key in ("theirs", "third"):
        assert taken(house, "us/ended@latest", key)[0].startswith("ended-v2/")
    assert house.ask("DELETE", f"/v1/shares/{share['id']}", "admin").status_code == 204
    house.refused(404, "GET", "/v1/adapters/us/ended/download", "theirs")


def test_what_is_removed_is_shared_no_longer(house: House) -> None:
    job = house.ask("POST", "/v1/jobs", json=tiny("gone")).json()
    house.recorder.record_state(job["id"], JobState.CANCELLED, "")
    house.ask("POST", "/v1/shares", json={"name": "gone", "tenant": "third"})
    assert len(house.ask("GET", "/v1/shares", "third").json()["received"]) == 1
    assert house.ask("DELETE", "/v1/jobs/gone").status_code == 204
    assert house.ask("GET", "/v1/shares", "third").json()["received"] == []


# --- who changed what -------------------------------------------------------------------------------------------------------


def test_changes_are_written_down_for_admins(house: House) -> None:
    job = house.ask("POST", "/v1/jobs", "third", json=tiny("seen")).json()["id"]
    house.ask("POST", f"/v1/jobs/{job}/pause", "third")
    house.ask("POST", f"/v1/jobs/{job}/cancel", "admin")
    found = house.ask("GET", "/v1/audit?limit=3", "admin").json()
    told = [(one["tenant"], one["key_name"], one["action"], one["object"]) for one in found["data"]]
    third = ("third", "third")
    assert told == [("staff", "admin", "cancel", job), (*third, "pause", job), (*third, "submit", job)]
    mine = house.ask("GET", "/v1/audit?tenant=third", "admin").json()["data"]
    assert [one["action"] for one in mine] == ["pause", "submit"]
    older = house.ask("GET", f"/v1/audit?limit=1&after={found['next']}", "admin").json()["data"]
    assert older[0]["id"] < found["data"][-1]["id"]


CHANGES: list[tuple[str, str, Json]] = [
    ("POST", "/v1/files", {"files": {"file": ("rows.jsonl", ROWS)}}),
    ("DELETE", "/v1/files/{file}", {}),
    ("POST", "/v1/shares", {"json": {"name": "ended", "tenant": "third"}}),
    ("DELETE", "/v1/shares/share-1", {}),
    ("DELETE", "/v1/adapters/lent", {}),
    ("POST", "/v1/jobs", {"json": tiny("written")}),
    ("POST", "/v1/jobs/written/pause", {}),
    ("POST", "/v1/jobs/written/cancel", {}),
]


def test_every_change_is_written_down_once(house: House) -> None:
    for method, path, request in CHANGES:
        if path.endswith("cancel"):
            job = house.ask("GET", "/v1/jobs/written").json()["id"]
        path = path.format(file=house.file["id"])
        before = house.ask("GET", "/v1/audit?limit=1", "admin").json()["data"][0]["id"]
        answer = house.ask(method, path, **request)
        assert answer.is_success, answer.text
        entry, last = house.ask("GET", "/v1/audit?limit=2", "admin").json()["data"]
        assert (last["id"], entry["tenant"]) == (before, "us"), path
    house.recorder.record_state(job, JobState.CANCELLED, "")
    assert house.ask("DELETE", "/v1/jobs/written").status_code == 204
    entry = house.ask("GET", "/v1/audit?limit=1", "admin").json()["data"][0]
    assert (entry["action"], entry["object"]) == ("delete", job)


# --- small things -----------------------------------------------------------------------------------------------------------


def test_metrics_are_for_admins_and_for_the_token(tmp_path: Path) -> None:
    with open_house(tmp_path, metrics_token="for-prometheus") as house:
        standing = JobStanding("training", 1, 4, 8, 60, 7.0, None)
        house.part(Hosts).hosts[0].progress = {house.job["id"]: standing}
        assert house.ask("GET", f"/v1/jobs/{house.job['id']}").json()["progress"] == {
            "phase": "training", "step": 1, "rollouts_done": 4, "rollouts_wanted": 8, "tokens": 60, "tokens_per_second": 7.0,
            "seconds_left": None, "warnings": [],
        }  # fmt: skip
        house.refused(401, "GET", "/metrics", "none")
        house.refused(401, "GET", "/metrics", "wrong")
        house.refused(403, "GET", "/metrics", "ours")
        house.keys["prometheus"] = "for-prometheus"
        for key in ("admin", "prometheus"):
            text = house.ask("GET", "/metrics", key).text
            assert 'motet_tokens_per_second{job="ended",tenant="us"} 7.0' in text
            assert house.job["id"] not in text
    with open_house(tmp_path / "open", open_to_all=True) as house:
        assert house.ask("GET", "/metrics", "none").status_code == 200


def test_a_body_that_is_too_large_is_not_read(house: House) -> None:
    address = ("127.0.0.1", int(house.http.base_url.port or 0))
    big = 10 * 2**30
    for head, sent in (
        (f"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: {big}\r\n\r\n", b""),
        ("POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
         f"Authorization: Bearer {house.keys['ours']}\r\nTransfer-Encoding: chunked\r\n\r\n", b"x" * 2**17),
        ("POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
         f"Authorization: Bearer {house.keys['ours']}\r\nTransfer-Encoding: chunked\r\n\r\n", b'"' + b"x" * (17 * 2**20)),
    ):  # fmt: skip
        with socket.create_connection(address, timeout=PATIENCE) as client:
            client.sendall(head.encode())
            if sent:
                client.sendall(f"{len(sent):x}\r\n".encode() + sent + b"\r\n")
            answer = client.recv(2**16)
            while b"}}" not in answer and (more := client.recv(2**16)):
                answer += more
        assert answer.startswith(b"HTTP/1.1 413"), answer
        assert b" MB" in answer
        assert b"invalid_request_error" in answer
    head = "POST /v1/adapters HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    with socket.create_connection(
        address, timeout=PATIENCE
    ) as client:  # no key: refused although nothing of it has come
        client.sendall(f"{head}Content-Length: 100000\r\n\r\n".encode())
        assert client.recv(2**16).startswith(b"HTTP/1.1 401")
    before = house.ask("GET", "/v1/files").json()["data"]
    house.refused(413, "POST", "/v1/files", files={"file": ("big.jsonl", ROWS * 10_000)})
    assert house.ask("GET", "/v1/files").json()["data"] == before


def test_odd_letters_are_told(house: House) -> None:
    for path in ("/v1/jobs/a%00b", "/v1/jobs?after=%00", "/v1/adapters/%00/download", "/v1/audit?tenant=a%00"):
        assert "NUL" in house.refused(422, "GET", path, "admin")["message"]
    for raw in ("/v1/jobs?after=%ff%fe", "/v1/jobs/%ff", "/v1/audit?tenant=%c3%28", "/v1/models?%80=%80"):
        answer = house.ask("GET", raw, "admin")
        assert answer.status_code < 500
        if answer.status_code != 200:
            error_of(answer)
    body = json.dumps({"tenant": "us", "name": "a\0b"}).encode()
    assert house.ask("POST", "/v1/keys", "admin", content=body).status_code < 500


def test_a_job_knows_its_last_reward(house: House) -> None:
    job = house.ask("POST", "/v1/jobs", json=tiny("rewarded")).json()
    assert job["reward"] is None
    house.recorder.record_step(job["id"], {"step": 0, "loss": 0.0, "reward": 0.25})
    house.recorder.record_step(job["id"], {"step": 1, "loss": 0.0, "reward": 0.75})
    house.recorder.record_step(job["id"], {"step": 2, "eval": {"reward": 0.1}})
    assert house.ask("GET", "/v1/jobs/rewarded").json()["reward"] == 0.75
