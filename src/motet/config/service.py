"""The configuration file of `motet serve`: engine and rollout, limits and rate of its tenants, rewards, uploads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from motet.config.engine import ClusterConfig, EngineConfig
from motet.config.job import PRIORITIES
from motet.config.rollout import OF_SAMPLING, VERSIONS_BESIDES, RolloutConfig, check_effect
from motet.config.urls import check_safe_url
from motet.section import Config, named

Role = Literal["reader", "member", "tenant-admin", "admin"]
TENANT_NAME = "[A-Za-z0-9][A-Za-z0-9_.-]*"


class LimitsConfig(Config):
    """What one tenant may use. A field that is null is no limit."""

    model_config = ConfigDict(defer_build=False)  # a route takes it, and FastAPI has to build what routes take
    running_jobs: int | None = Field(16, ge=1, le=10**6)
    """Jobs that run at once; more wait in the queue."""
    queued_jobs: int | None = Field(100, ge=0, le=10**6)
    """Jobs that wait besides those that may run; paused ones count."""
    client_models: int | None = Field(32, ge=0, le=10**6)
    """Models of clients of the Tinker protocol that have not ended; they count as jobs too."""
    open_samples: int | None = Field(1024, ge=1, le=10**6)
    """Samples of the Tinker protocol that are under way or were not fetched."""
    rank: int | None = Field(None, ge=1, le=10**6)
    """The largest `adapter.rank` of a job."""
    steps: int | None = Field(None, ge=1, le=10**9)
    """The most `steps` of a job."""
    tokens_per_day: int | None = Field(10**9, ge=1, le=10**15)
    """Tokens sampled, trained and read as prompts of completions, on one day (UTC). Jobs pause when they are spent."""
    storage_mb: float | None = Field(50_000.0, ge=0, le=1e12, allow_inf_nan=False)
    """All that is kept for the tenant: uploaded files and adapters, open samples, and of its jobs commits, versions,
    checkpoints, rollouts, logs and commands of clients. A write that does not fit is refused, and jobs pause."""
    cpu_seconds: float | None = Field(60.0, gt=0, le=1e9)
    """The most `cpu_seconds` of a job's rewards."""
    wall_seconds: float | None = Field(600.0, gt=0, le=1e9)
    """The most `wall_seconds` of a job's rewards, or of an episode of its agent."""
    memory_mb: int | None = Field(2048, ge=64, le=10**9)
    """The most `memory_mb` of a job's rewards."""
    priority: Literal["low", "normal", "high"] | None = None
    """The highest class of priority of a job. Where it is null a job may have any, and none counts for more than `normal`
    against other tenants."""
    share: float = Field(1.0, gt=0, le=1000, allow_inf_nan=False)
    """The tenant's weight: with twice the share, twice the tokens where tenants compete."""
    device_seconds_per_day: float | None = Field(None, gt=0, le=1e9, allow_inf_nan=False)
    """Seconds of the device on one day (UTC), whatever it did for the tenant. Jobs pause when they are spent."""

    @property
    def highest_priority(self) -> int | None:
        """As the number that a job has."""
        return None if self.priority is None else PRIORITIES[self.priority]


class RateConfig(Config):
    """How often one key may ask."""

    requests_per_second: float | None = Field(50.0, gt=0)
    """On the long run; null is no limit."""
    burst: int = Field(100, ge=1)
    """Requests that may come at once after a while without any."""


class HttpConfig(Config):
    """What the HTTP process takes from everybody together, from one address and from one key."""

    hosts: list[str] = []
    """Without keys (`--no-keys`): names besides this machine's own under which browsers and clients may ask, such as
    `studio.example.org`."""
    connections: int | None = Field(None, ge=8, le=10**6)
    """Open connections; null is three quarters of the open files that the process may have."""
    connections_per_address: int | None = Field(2048, ge=1, le=10**6)
    """Open connections from one address; behind a proxy all have the address of the proxy, so give null there."""
    header_seconds: float = Field(10.0, gt=0, le=3600)
    """Time for a connection to send the head of a request."""
    body_seconds: float = Field(30.0, gt=0, le=3600)
    """Time for a connection to send a body, besides one second for each 16 KB of it that came."""
    requests_per_key: int = Field(2048, ge=1, le=10**6)
    """Open requests of one key, and without a key of one address."""
    streams_per_key: int = Field(64, ge=1, le=10**6)
    """Open streams of events of one key."""
    open_mb: float = Field(1024.0, ge=1, le=1e6, allow_inf_nan=False)
    """Memory that the bodies of open requests and the prompts of open samples may take, of everybody together."""
    open_mb_per_tenant: float = Field(256.0, ge=1, le=1e6, allow_inf_nan=False)
    """The same of one tenant."""
    processes: int = Field(2, ge=1, le=256)
    """Processes for work that takes long or grows: schemas of answers, gradients, job files."""
    waiting_per_tenant: int = Field(64, ge=1, le=10**6)
    """Pieces of such work that may wait, of one tenant."""
    work_seconds: float = Field(5.0, gt=0, le=3600)
    """Time of the processor that one piece of such work may take."""
    work_memory_mb: int = Field(1024, ge=256, le=10**6)
    """Memory that each of these processes may take."""


class OidcConfig(Config):
    """How people sign in through an OpenID Connect provider. Each sign-in makes a key that expires; see `roles`."""

    issuer: str
    """URL of the provider, exactly as its tokens name it. It has to be https unless it is on this machine."""
    client_id: str = Field(min_length=1, max_length=500)
    """The id of this service at the provider."""
    client_secret: str = Field("", max_length=2000, repr=False)
    """Its secret; empty for a public client. The environment variable MOTET_OIDC_SECRET goes before it."""
    scopes: list[str] = ["openid", "profile", "email"]
    """What is asked of the provider. Some providers send groups only with a scope of their own."""
    tenant: str = Field("", max_length=100, pattern=f"^({TENANT_NAME})?$")
    """The tenant of everybody who signs in. Give either this or `tenant_claim`."""
    tenant_claim: str = Field("", max_length=200)
    """The claim that names a person's tenant. Take one that people cannot change themselves."""
    groups_claim: str = Field("groups", max_length=200)
    """The claim that lists a person's groups."""
    name_claim: str = Field("", max_length=200)
    """The claim that names the person in key lists and audit entries; `preferred_username`, `email`, `name` or `sub` unless
    given."""
    roles: dict[str, Role] = Field(min_length=1, max_length=1000)
    """Role by group: `reader`, `member`, `tenant-admin` or `admin`. A person has the highest role of all their groups, and
    is refused without one. The group `*` is everybody."""
    hours: float = Field(12.0, gt=0, le=24 * 31, allow_inf_nan=False)
    """How long a sign-in lasts."""
    per_minute: float = Field(20.0, gt=0, le=10**4, allow_inf_nan=False)
    """Sign-ins that one address may begin in a minute."""

    @field_validator("issuer")
    @classmethod
    def _is_reached_safely(cls, issuer: str) -> str:
        check_safe_url(issuer)
        return issuer

    @field_validator("scopes")
    @classmethod
    def _ask_for_an_identity(cls, scopes: list[str]) -> list[str]:
        if "openid" not in scopes:
            raise ValueError("must include `openid`")
        return scopes

    @model_validator(mode="after")
    def _names_one_tenant(self) -> OidcConfig:
        if bool(self.tenant) == bool(self.tenant_claim):
            raise ValueError("give either `tenant`, one for everybody, or `tenant_claim`, the claim that names it")
        return self


class InstalledReward(Config):
    """A function of the operator's that jobs may name. A plain string is the function."""

    function: str
    """`file.py:function` or `module:function`."""
    args: dict[str, Any] = {}
    """Keyword arguments; those of a job win."""
    wall: bool = True
    """Whether it runs behind a wall: without network, without files but Python's own, without other processes. Its file is
    loaded before the wall goes up."""


BASE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,99}")
_USUAL_RANK = 64
_USUAL_LAG = 4


@dataclass(frozen=True)
class Largest:
    """The largest jobs that servers are started for; their sizes cannot change while they run. None is any."""

    rank: int | None = None
    """Of `adapter.rank`."""
    lag: int | None = None
    """Of `algorithm.max_off_policy_steps`."""
    usual_rank: int | None = None
    """That of a tenant without limits of its own, where no such server has a rank."""


ANY_SIZE = Largest()


class ServedBase(EngineConfig):
    """One of several bases of a service: what it is, and settings of its hosts that go before those of `engine`."""

    base: str = Field(min_length=1)
    """`small`, a hub id, a directory or a .gguf file."""
    rollout: Annotated[RolloutConfig, named("engine")] = RolloutConfig()
    """Where rollouts on it are sampled and people who ask it are answered: as `rollout` in a job file, which is taken from the
    top of the file where the base has none. A server has one base."""

    @property
    def engine(self) -> EngineConfig:
        """The settings of its hosts."""
        return EngineConfig.model_validate(self.model_dump(exclude={"base", "rollout"}))

    @model_validator(mode="after")
    def _settings_are_of_the_engine(self) -> ServedBase:
        check_effect(self.engine, self.rollout)
        return self


class ServiceConfig(Config):
    """The file that `motet serve --config` reads."""

    engine: EngineConfig = EngineConfig()
    """As in a job file."""
    rollout: RolloutConfig = RolloutConfig()
    """As in a job file."""
    cluster: Annotated[ClusterConfig, named("launcher")] = ClusterConfig()
    """As in a job file."""
    bases: dict[str, Annotated[ServedBase, named("base")]] = {}
    """Bases by the names that jobs give, each on hosts of its own; the first is that of a job which names none."""
    limits: LimitsConfig = LimitsConfig()
    """What each tenant may use unless an admin sets something else for it."""
    rate: RateConfig | None = None
    """How often a key may ask; a service without keys has no such limit unless this is given."""
    http: HttpConfig = HttpConfig()
    """Connections, open requests and the work of the HTTP process."""
    oidc: OidcConfig | None = None
    """Sign-in through an OpenID Connect provider, besides keys; `motet serve` then needs --public-url."""
    rewards: dict[str, Annotated[InstalledReward, named("function")]] = {}
    """Functions that jobs may use as rewards, by the names that jobs give them."""
    unwalled: list[Literal["scorer", "math"]] = []
    """Rewards that evaluate parts of an answer as Python and may do so without a wall. Where the machine has no wall, jobs with
    others of them are refused."""
    reward_hosts: list[str] | None = None
    """Hosts that the reward `http` may ask: `scores.example.org`, `*.example.org`, `10.0.0.7:8000`; they may be private. All
    public hosts unless given; an empty list allows none."""
    lease_seconds: float = Field(60.0, ge=1, le=3600)
    """How long a reward worker that says nothing more keeps the rollouts that it took, and an agent worker its episodes; then
    others get them."""
    patience_seconds: float = Field(120.0, gt=0, le=86400)
    """How long a job keeps a slot that another could use, while it waits for scores or an agent worker and asks nothing of the
    device; each time it is sent away before it has done a step, it is given twice as long."""
    takeover_seconds: float = Field(600.0, ge=0, le=86400)
    """How long the engine keeps training when the process of `motet serve` was killed, and waits for a new one to take it over;
    then its jobs save and it ends. 0: it ends at once."""
    metrics_token: str = ""
    """What Prometheus brings as a key to read `/metrics`; an admin's key does too."""
    secret_key_file: str = ""
    """The key that encrypts secrets of jobs, such as headers of HTTP rewards; `secret.key` in the directory, made at the first
    start, unless given. The environment variable MOTET_SECRET_KEY goes before both."""
    max_upload_mb: float = Field(64.0, gt=0)
    """The largest file of rows."""
    max_adapter_mb: float = Field(512.0, gt=0)
    """The largest uploaded adapter, packed or unpacked."""

    @model_validator(mode="before")
    @classmethod
    def _bases_have_what_engine_says(cls, tree: Any) -> Any:
        """What a base does not say of its hosts is as in `engine`, and of its servers as in `rollout`."""
        if not isinstance(tree, dict) or not isinstance(tree.get("bases"), dict):
            return tree
        return {**tree, "bases": {name: _with_shared(one, tree) for name, one in tree["bases"].items()}}

    @field_validator("bases")
    @classmethod
    def _can_be_named(cls, bases: dict[str, ServedBase]) -> dict[str, ServedBase]:
        for name in bases:
            if not BASE_NAME.fullmatch(name) or name == "base":
                raise ValueError(
                    f"{name!r} cannot be a name: take letters, digits and . _ - /, and not the word `base`"
                )
        return bases

    @field_validator("bases")
    @classmethod
    def _have_servers_of_their_own(cls, bases: dict[str, ServedBase]) -> dict[str, ServedBase]:
        owners: dict[str, str] = {}
        for name, base in bases.items():
            for url in base.rollout.urls:
                if (other := owners.setdefault(url, name)) != name:
                    raise ValueError(
                        f"the server {url} is for {other!r} and for {name!r}, but a server has one base: give each base the "
                        "`urls` of its own servers, in a `rollout` of its own"
                    )
        return bases

    def largest(self, engine: EngineConfig, rollout: RolloutConfig) -> Largest:
        """What servers that a base's hosts start have room for: as `rollout.launch` says, as limits allow, or what is usual."""
        launch = rollout.launch
        if launch is None:
            return Largest(usual_rank=self.limits.rank)
        lag = launch.max_cpu_loras // engine.slots - VERSIONS_BESIDES if launch.max_cpu_loras else _USUAL_LAG
        return Largest(launch.max_rank or self.limits.rank or _USUAL_RANK, max(lag, 0))


def _with_shared(base: Any, tree: Mapping[str, Any]) -> Any:
    """A base of a file with what the file says of all; one with servers does without what the embedded engine alone reads."""
    base = {"base": base} if isinstance(base, str) else base
    if not isinstance(base, dict):
        return base
    rollout = base.get("rollout", tree.get("rollout"))
    kind = rollout.get("engine") if isinstance(rollout, dict) else rollout
    engine = tree["engine"] if isinstance(tree.get("engine"), dict) else {}
    shared = {name: value for name, value in engine.items() if kind in (None, "embedded") or name not in OF_SAMPLING}
    return {**shared, **({} if rollout is None else {"rollout": rollout}), **base}
