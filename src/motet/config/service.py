"""The configuration file of `motet serve`: engine and rollout, limits and rate of its tenants, rewards, uploads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StrictBool, field_validator, model_validator

from motet.config import HostConfig
from motet.config.engine import ClusterConfig, EngineConfig
from motet.config.job import PRIORITIES
from motet.config.observer import Observers
from motet.config.rollout import OF_SAMPLING, RolloutConfig, check_effect
from motet.config.urls import check_safe_url
from motet.core.settings import Config, named

Role = Literal["reader", "member", "tenant-admin", "admin"]
TENANT_NAME = "[A-Za-z0-9][A-Za-z0-9_.-]*"


class LimitsConfig(Config):
    """What one tenant may use. `null` means no limit."""

    model_config = ConfigDict(defer_build=False)  # a route accepts it, and FastAPI must be able to build it
    running_jobs: int | None = Field(16, ge=1, le=10**6)
    """Slots that its jobs hold at once: one for each job, two with a critic, one for each role. More jobs wait in the queue."""
    queued_jobs: int | None = Field(100, ge=0, le=10**6)
    """Jobs that wait beyond those that may run, paused ones included. For tenants that submit sweeps."""
    client_models: int | None = Field(32, ge=0, le=10**6)
    """Open models of clients of the Tinker protocol. They also count as jobs. For tenants with many notebooks."""
    open_samples: int | None = Field(16_384, ge=1, le=10**6)
    """Completions of Tinker samples (`num_samples` each) that are in progress or not fetched. One sample alone may have any
    number. For clients that ask far ahead."""
    rank: int | None = Field(None, ge=1, le=10**6)
    """The largest `adapter.rank` of a job. For bases that leave little memory."""
    steps: int | None = Field(None, ge=1, le=10**9)
    """The largest `steps` of a job. For courses and trials."""
    step_tokens: Annotated[int, Field(ge=1, le=10**15)] | Literal["auto"] | None = "auto"
    """The most tokens of a step of a job, or of a client's: prompts read, tokens sampled and trained, held-out evaluation.
    `auto` is what the base does alone in ten minutes. For services whose tenants share slots: a step is their shortest turn."""
    tokens_per_day: int | None = Field(10**9, ge=1, le=10**15)
    """Tokens sampled, trained and read as prompts, per day (UTC). Jobs pause when they are spent."""
    storage_mb: float | None = Field(50_000.0, ge=0, le=1e12, allow_inf_nan=False)
    """Everything stored for the tenant: uploads, open samples, and the configurations, commits, versions, checkpoints,
    rollouts, logs and client commands of its jobs. A write that does not fit is refused, and jobs pause."""
    cpu_seconds: float | None = Field(60.0, gt=0, le=1e9)
    """The largest `cpu_seconds` of a reward. Raise it for tenants whose rewards run tests."""
    wall_seconds: float | None = Field(600.0, gt=0, le=1e9)
    """The largest `wall_seconds` of a reward, or of an episode of an agent. Raise it for tenants with long episodes."""
    memory_mb: int | None = Field(2048, ge=64, le=10**9)
    """The largest `memory_mb` of a reward. Raise it for tenants whose rewards load data."""
    priority: Literal["low", "normal", "high"] | None = None
    """The highest priority class of a job. With null, a job may have any priority, but nothing above `normal` counts
    against other tenants."""
    share: float = Field(1.0, gt=0, le=1000, allow_inf_nan=False)
    """Weight of the tenant: twice the share gets twice the tokens when tenants compete."""
    device_seconds_per_day: float | None = Field(None, gt=0, le=1e9, allow_inf_nan=False)
    """Device seconds per day (UTC), whatever they were used for. Jobs pause when they are spent. For operators who pay for a
    device by the second."""
    cpu_seconds_per_day: float | None = Field(200_000.0, gt=0, le=1e9, allow_inf_nan=False)
    """CPU seconds of rewards, graders, schemas, uploads and preparations of jobs per day (UTC). Jobs pause when they are
    spent. Tenants that an earlier release made have no such limit unless an admin sets one."""

    @property
    def highest_priority(self) -> int | None:
        """The class as a job's number."""
        return None if self.priority is None else PRIORITIES[self.priority]


class RateConfig(Config):
    """How often the keys of one tenant together may send requests."""

    requests_per_second: float | None = Field(50.0, gt=0)
    """Long-term rate; null means no limit. Raise it for tenants with many workers."""
    burst: int = Field(100, ge=1)
    """Requests at once after a pause. Raise it for clients that send many at a time."""


class HttpConfig(Config):
    """Limits of the HTTP process: in total, per address and per tenant."""

    hosts: list[str] = []
    """Without keys (`--no-keys`): other names under which browsers and clients may reach this machine, such as
    `studio.example.org`."""
    connections: int | None = Field(None, ge=8, le=10**6)
    """Open connections. Null means three quarters of the process's limit of open files. For hosts with little memory."""
    connections_per_address: int | None = Field(2048, ge=1, le=10**6)
    """Open connections from one address. Behind a proxy all connections have its address, so set null there."""
    body_seconds: float = Field(30.0, gt=0, le=3600)
    """Time to send a body, plus one second for each 16 KB received; as long to take a part of an answer, and a third of it to
    send the head of a request. For operators whose clients are on slow networks."""
    requests_per_tenant: int = Field(2048, ge=1, le=10**6)
    """Open requests of all keys of one tenant together, or of one address without a good key. For tenants with many workers."""
    streams_per_tenant: int = Field(64, ge=1, le=10**6)
    """Open event streams of one tenant. For tenants with many dashboards."""
    open_mb: float = Field(1024.0, ge=1, le=1e6, allow_inf_nan=False)
    """Memory for bodies of open requests and for open samples: their prompts and longest answers, in total. A second
    budget of this size is for answers above 64 KB until their client has read them. Lower it on hosts with little memory."""
    open_mb_per_tenant: float = Field(256.0, ge=1, le=1e6, allow_inf_nan=False)
    """The same for one tenant. Raise it for large gradients."""
    processes: int = Field(2, ge=1, le=256)
    """Processes for expensive work: answer schemas, gradients, job files. Raise it on hosts with many cores."""
    waiting_per_tenant: int = Field(64, ge=1, le=10**6)
    """Pieces of such work that may wait, and uploads that may be open, for one tenant. For tenants with many workers."""
    work_seconds: float = Field(5.0, gt=0, le=3600)
    """CPU time for one piece of such work, in 1 GB of memory. For operators with slow processors."""


class OidcConfig(Config):
    """How people sign in through an OpenID Connect provider. Each sign-in makes a key that expires; see `roles`.

    The secret of a client that has one is in the environment variable MOTET_OIDC_SECRET.
    """

    issuer: str
    """URL of the provider, exactly as in its tokens. It must be https unless it is on this machine."""
    client_id: str = Field(min_length=1, max_length=500)
    """The id of this service at the provider."""
    scopes: list[str] = ["openid", "profile", "email"]
    """Scopes to request. Whoever has a provider that sends groups only with an extra scope adds it, as for Okta `groups`."""
    tenant: str = Field("", max_length=100, pattern=f"^({TENANT_NAME})?$")
    """The tenant of everyone who signs in, for a service of one team. Set this or `tenant_claim`."""
    tenant_claim: str = Field("", max_length=200)
    """The claim with a person's tenant. Choose one that people cannot change."""
    groups_claim: str = Field("groups", max_length=200)
    """The claim that lists a person's groups, as the provider calls it."""
    roles: dict[str, Role] = Field(min_length=1, max_length=1000)
    """Role by group: `reader`, `member`, `tenant-admin` or `admin`. A person gets the highest role of all their groups, and
    is refused without one. The group `*` is everyone."""
    hours: float = Field(12.0, gt=0, le=24 * 31, allow_inf_nan=False)
    """Hours until a sign-in expires. Lower it where shared machines sign in."""
    per_minute: float = Field(20.0, gt=0, le=10**4, allow_inf_nan=False)
    """Sign-ins that one address may start per minute. Raise it for an office behind one address."""

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
    """Keyword arguments. A job's arguments take precedence."""
    wall: bool = True
    """Run it behind a wall: no network, no files except Python's own, no other processes. Its file is loaded first."""


BASE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,99}")
TENANTS = "tenants"
"""The name among `rewards` of the switch for those of tenants."""
_USUAL_RANK = 64
_USUAL_LAG = 4


@dataclass(frozen=True)
class Largest:
    """The largest jobs for which servers start; a running server cannot change its limits. None means any size."""

    rank: int | None = None
    """The largest `adapter.rank`."""
    lag: int | None = None
    """The largest `algorithm.max_off_policy_steps`."""
    usual_rank: int | None = None
    """The default limit on a tenant's rank, used if `rank` is None."""


ANY_SIZE = Largest()


class ServedBase(EngineConfig):
    """One of several bases of a service, and settings of its hosts that override those of `engine`."""

    base: str = Field(min_length=1)
    """`small`, a hub id, a directory or a .gguf file."""
    rollout: Annotated[RolloutConfig, named("engine")] = RolloutConfig()
    """Where to sample rollouts and answers on this base, as in a job file. By default the `rollout` at the top of the file.
    A server has one base."""

    @property
    def engine(self) -> EngineConfig:
        """The device and the budgets of its hosts."""
        return EngineConfig.model_validate(self.model_dump(exclude={"base", "rollout"}))

    @property
    def host(self) -> HostConfig:
        """The settings of its hosts."""
        return HostConfig(base=self.base, engine=self.engine, rollout=self.rollout)

    @model_validator(mode="after")
    def _settings_are_of_the_engine(self) -> ServedBase:
        check_effect(self.engine, self.rollout)
        return self


class ServiceConfig(Config):
    """The file that `motet serve --config` reads."""

    engine: EngineConfig = EngineConfig()
    """As in a job file."""
    rollout: Annotated[RolloutConfig, named("engine")] = RolloutConfig()
    """As in a job file."""
    cluster: Annotated[ClusterConfig, named("launcher")] = ClusterConfig()
    """As in a job file."""
    bases: dict[str, Annotated[ServedBase, named("base")]] = {}
    """Bases by name, each on its own hosts, for a service with several. The first is that of jobs that name none."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of each tenant for which an admin has set no others; a service for strangers sets them."""
    rate: RateConfig | None = None
    """Request rate of a tenant. A service without keys has no such limit unless you set it."""
    http: HttpConfig = HttpConfig()
    """Limits on connections, requests and the work of the HTTP process."""
    oidc: OidcConfig | None = None
    """Sign-in through an OpenID Connect provider, in addition to keys. It needs --public-url."""
    rewards: dict[str, Annotated[InstalledReward, named("function")] | StrictBool] = {}
    """Functions that jobs may use as rewards, by name. `tenants: true` lets tenants send a reward's file with a job; it runs
    behind the wall, without which the service does not start then."""
    unwalled: list[Literal["scorer", "math"]] = []
    """Rewards that evaluate parts of an answer as Python and may run without a wall. On a machine without a wall, jobs are
    refused if they use one that is not in this list."""
    reward_hosts: list[str] | None = None
    """Hosts that the reward `http` may call: `scores.example.org`, `*.example.org`, `10.0.0.7:8000`. They may be private.
    By default all public hosts; an empty list allows none."""
    observers: Observers = []
    """What receives every step of all jobs: trackers, each with a project for each tenant, or your own code."""
    lease_seconds: float = Field(60.0, ge=1, le=3600)
    """Time after which the rollouts of a silent reward worker, or the episodes of a silent agent worker, go to others.
    Raise it for workers on laptops that sleep."""
    patience_seconds: float = Field(120.0, gt=0, le=86400)
    """Time that a job keeps a slot that another job needs while it waits for scores or an agent and asks nothing of the
    device. If it must give the slot up again before it finishes a step, it gets twice as long. Raise it for slow agents."""
    step_seconds: float = Field(60.0, gt=0, le=86400)
    """Time that a step may go on after its job must give its slot to another tenant's. Then the step is dropped, and done again
    at the job's next turn with twice the device seconds. Operators with slow devices raise it, so that most steps end."""
    metrics_token: str = ""
    """A key for Prometheus to read `/metrics`. An admin key also works."""
    secret_key_file: str = ""
    """File with the key that encrypts secrets of jobs, such as headers of HTTP rewards. By default `secret.key` in the
    directory, made at the first start. The environment variable MOTET_SECRET_KEY takes precedence."""
    max_upload_mb: float = Field(64.0, gt=0)
    """The largest file of rows. Raise it for tenants with long documents."""
    max_adapter_mb: float = Field(512.0, gt=0)
    """The largest uploaded adapter, packed or unpacked. Raise it for large bases."""

    @model_validator(mode="before")
    @classmethod
    def _bases_have_what_engine_says(cls, tree: Any) -> Any:
        """Fill in a base's missing settings: those of hosts from `engine`, those of servers from `rollout`."""
        if not isinstance(tree, dict) or not isinstance(tree.get("bases"), dict):
            return tree
        return {**tree, "bases": {name: _with_shared(one, tree) for name, one in tree["bases"].items()}}

    @field_validator("rewards")
    @classmethod
    def _have_one_switch(cls, rewards: dict[str, InstalledReward | bool]) -> dict[str, InstalledReward | bool]:
        for name, given in rewards.items():
            if isinstance(given, bool) != (name == TENANTS):
                raise ValueError(f"`{TENANTS}` is true or false, and every other name has a function; {name!r} has not")
        return rewards

    @property
    def installed(self) -> dict[str, InstalledReward]:
        """The functions among `rewards`."""
        return {name: given for name, given in self.rewards.items() if not isinstance(given, bool)}

    @property
    def sent_rewards(self) -> bool:
        """Whether tenants may send rewards of their own."""
        return bool(self.rewards.get(TENANTS, False))

    @field_validator("bases")
    @classmethod
    def _have_names_and_servers_of_their_own(cls, bases: dict[str, ServedBase]) -> dict[str, ServedBase]:
        for name in bases:
            if not BASE_NAME.fullmatch(name) or name == "base":
                raise ValueError(
                    f"{name!r} cannot be a name: take letters, digits and . _ - /, and not the word `base`"
                )
        owners: dict[str, str] = {}
        for name, base in bases.items():
            for url in base.rollout.urls:
                if (other := owners.setdefault(url, name)) != name:
                    raise ValueError(
                        f"the server {url} is for {other!r} and for {name!r}, but a server has one base: give each base the "
                        "`urls` of its own servers, in a `rollout` of its own"
                    )
        return bases

    @model_validator(mode="after")
    def _settings_are_of_the_engine(self) -> ServiceConfig:
        """Check settings of several bases: those that sample themselves may read fields that the others ignore."""
        if all(base.rollout.engine != "embedded" for base in self.bases.values()):
            check_effect(self.engine, self.rollout)
        return self

    def largest(self, host: HostConfig) -> Largest:
        """The limits of servers that a base's hosts start: from `rollout.launch`, from `limits`, or the usual ones."""
        launch = host.rollout.launch
        if launch is None:
            return Largest(usual_rank=self.limits.rank)
        return Largest(launch.max_rank or self.limits.rank or _USUAL_RANK, _USUAL_LAG)


def _with_shared(base: Any, tree: Mapping[str, Any]) -> Any:
    """A base with the file's common settings; one with servers leaves out fields that only the embedded engine reads."""
    base = {"base": base} if isinstance(base, str) else base
    if not isinstance(base, dict):
        return base
    rollout = base.get("rollout", tree.get("rollout"))
    kind = rollout.get("engine") if isinstance(rollout, dict) else rollout
    engine = tree["engine"] if isinstance(tree.get("engine"), dict) else {}
    shared = {name: value for name, value in engine.items() if kind in (None, "embedded") or name not in OF_SAMPLING}
    return {**shared, **({} if rollout is None else {"rollout": rollout}), **base}
