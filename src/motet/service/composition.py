"""Assembles the parts of a service."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict

from motet.hosts.host_link import HostHandlers
from motet.hosts.hosts import Hosts
from motet.hosts.messages import StartHost
from motet.hosts.starts import launcher, starts_of
from motet.kernels.cpu.choice import of_tenants
from motet.observe.follow import Followers
from motet.process.isolated_calls import IsolatedPool
from motet.process.isolated_process import WorkLimits
from motet.process.thread_turns import ThreadTurns
from motet.rewards.reward_http import HttpRewards
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.identity import computed_by
from motet.service.adapters.adapters import Adapters
from motet.service.adapters.listing import Listing
from motet.service.answers import Asks
from motet.service.database.store import Store
from motet.service.events import EventBus, EventLog
from motet.service.http.auth import Access, EncodeThreads, RateLimit
from motet.service.http.downloads import Packing
from motet.service.http.open_bytes import OpenBytes
from motet.service.http.sign_in import SignIns
from motet.service.jobs.erasure import Erasure
from motet.service.jobs.fine_tuning import FineTunings
from motet.service.jobs.handover import Handover, begun_jobs
from motet.service.jobs.initial_adapter import InitialAdapters
from motet.service.jobs.queue import JobQueue
from motet.service.jobs.recorder import EventRecorder
from motet.service.jobs.submissions import Submissions
from motet.service.jobs.validation import Allowed
from motet.service.request_log import RequestFiles, RequestMetrics
from motet.service.rewards import Grading, Scoring
from motet.service.rollouts import RolloutLogs
from motet.service.secrets import Secrets
from motet.service.settings import Settings
from motet.service.storage import Storage
from motet.service.tenants.ledger import Ledger
from motet.service.tenants.quotas import QuotaEnforcer, Quotas
from motet.service.tenants.stored import StoredBytes
from motet.service.workers.agents import AgentWorkers
from motet.service.workers.attached import AttachedWorkers
from motet.service.workers.rewards import RewardWorkers

_log = logging.getLogger(__name__)
JOBS_AHEAD = 4
"""Jobs of each tenant that a host prepares while its slots are taken; others wait in the database."""
_CHECKING, _READING, _WRITING, _STREAMING, _ANSWERING, _ENCODING = 4, 8, 32, 4, 8, 4
"""Threads that check jobs, read files, write, read events, list, and encode; each tenant uses at most one of each."""
_MOST_STREAMS = 10**6
"""Of a tenant that wait for their turn; connections are limited elsewhere."""


class Service:
    """The parts of a service; routes access them by name."""

    def __init__(self, settings: Settings, store: Store, secrets: Secrets) -> None:
        config, http, bases = settings.config, settings.config.http, settings.bases
        self.settings, self.store, self.secrets, self.bases = settings, store, secrets, bases
        self.storage, self.bus = Storage(settings.directory), EventBus()
        bases.known = store.known_bases(bases.places if bases.several else {})
        self.log, self.rollout_logs = EventLog(store, self.bus), RolloutLogs()
        self.adapters = Adapters(store, self.storage, bases)
        self.listing = Listing(store, self.storage, self.adapters)
        starts = (_start(settings, self.storage, store, name) for name in settings.hosts)
        launch = launcher(config.cluster, *settings.hosts.values()) or settings.launch
        self.hosts = Hosts(starts_of(*zip(starts, settings.hosts.values(), strict=True)), settings.directory, launch)
        self.hosts.jobs.ahead = JOBS_AHEAD
        self.ledger, self.stored = Ledger(store), StoredBytes(store, self.storage)
        slots = sum(host.engine.slots for host in settings.hosts.values())
        self.quotas = Quotas(store, self.stored, self.ledger, config.limits, slots)
        self.enforcer = QuotaEnforcer(self.quotas, self.ledger, self.hosts)
        self.reward_workers = RewardWorkers(store, self.bus, config.lease_seconds, self.quotas)
        self.agent_workers = AgentWorkers(store, self.bus, config.lease_seconds)
        self.asks = Asks(self.hosts, self.quotas.tokens_left)
        self.grading = Grading(self.asks, self.adapters, self.ledger.count_cpu)
        allowed = Allowed.by(settings)
        asking = secrets.asking(HttpRewards(allowed.addresses))
        self.scoring = Scoring(store, asking, self.reward_workers, self.grading)
        workers = self.reward_workers, self.agent_workers
        self.followers = Followers(config.observers, settings.directory / "observers", _log.warning)
        self.recorder = EventRecorder(store, self.storage, self.ledger, self.stored, self.bus, workers, self.followers)
        initial = InitialAdapters(self.storage, self.adapters)
        self.handover = Handover(
            store, self.storage, self.log, self.recorder, initial, self.enforcer, self.hosts, bases, secrets,
            config.sent_rewards,
        )  # fmt: skip
        self.queue = JobQueue(
            store, self.bus, self.adapters, initial, self.recorder.record_state, self.handover.hand_over
        )
        self.submissions = Submissions(
            allowed, bases, store, self.storage, self.bus, self.adapters, self.quotas, self.enforcer, self.queue,
            self.handover, self.hosts, secrets, self.recorder, self.ledger,
        )  # fmt: skip
        self.erasure = Erasure(store, self.storage, self.adapters, self.submissions, self.followers.home)
        self.fine_tunings = FineTunings(store, self.storage, self.adapters)
        self.check_threads = ThreadTurns(_CHECKING, http.waiting_per_tenant)
        self.read_threads = ThreadTurns(_READING, http.waiting_per_tenant)
        """For files of rows and archives, which may take minutes."""
        self.write_threads = ThreadTurns(_WRITING, http.requests_per_tenant)
        """For writes, which wait for others of their tenant."""
        self.answer_threads = ThreadTurns(_ANSWERING, http.requests_per_tenant)
        self.encode_threads = EncodeThreads(_ENCODING, http.requests_per_tenant)
        self.stream_threads = ThreadTurns(_STREAMING, _MOST_STREAMS)
        """For reads of event streams: all those of a tenant read whenever there is an event."""
        self.streams = Counter[str]()
        """Open event streams, by tenant."""
        self.packing = Packing(self.storage.directory, self.read_threads)
        limits = WorkLimits(http.work_seconds)
        self.isolated = IsolatedPool(limits, http.processes, http.waiting_per_tenant, self.ledger.count_cpu)
        self.open_bytes, self.open_answers = OpenBytes(http), OpenBytes(http)
        self.sign_ins = SignIns(settings, store, secrets)
        rate = RateLimit(config.rate, restarted=settings.restarted)
        self.access = Access(store.tenants, rate, self.agent_workers, settings.open_to_all)
        self.request_metrics, self.request_files = RequestMetrics(), RequestFiles(settings.directory)

    @property
    def workers(self) -> Mapping[str, AttachedWorkers]:
        """Workers on their owners' machines, by the kind of their work."""
        return {"rewards": self.reward_workers, "episodes": self.agent_workers}

    def handlers(self) -> HostHandlers:
        """Callbacks for reports of hosts."""

        def rest(job_id: str, wanted: bool) -> None:
            self.reward_workers.rest(job_id, wanted)
            self.agent_workers.rest(job_id, wanted)

        def obeyed(job_id: str) -> None:
            self.stored.changed(job_id)
            self.bus.publish(job_id)

        return HostHandlers(
            self.handover.open_jobs, self.recorder.record_event, self.recorder.record_usage, self.scoring.answer, rest,
            self.ledger.count_completion, obeyed, self.agent_workers.run, self.handover.reconcile,
        )  # fmt: skip


def _start(settings: Settings, storage: Storage, store: Store, base: str) -> StartHost:
    config, own = settings.config, None
    if settings.hosts[base].engine.kernels == "auto":
        begun = defaultdict[str, list[JobDirectory]](list)
        for job, tenant, stored in begun_jobs(store):
            if settings.bases.called(stored) == base:
                begun[tenant].append(storage.job(job))
        own = of_tenants(map(computed_by, begun.values()))
    return StartHost(
        base=settings.bases.places[base],
        serves=base,
        run=str(storage.run),
        rewards={name: asdict(one) for name, one in settings.rewards.items()},
        unwalled=list(config.unwalled),
        patience_seconds=config.patience_seconds,
        step_seconds=config.step_seconds,
        largest=config.largest(settings.hosts[base]),
        own=own,
    )
