// The tenant's jobs: requested every few seconds, and immediately when the state of one changes.
import {ask, jobPath} from "./api.js";
import {FINAL} from "./words.js";

const EVERY = 3000; // milliseconds between requests for the running jobs
const WHOLE = 5; // one in this many requests asks for all jobs
const PAGE = 100;
const OPEN = ["running", "queued", "paused"];

export class Board {
  constructor(live) {
    this.live = live;
    this.jobs = []; // newest first
    this.older = null; // cursor of the next page; null at the end
    this.paged = false; // whether older pages were loaded
    this.asked = 0;
    this.listeners = new Set();
    this.places = new Map(); // id → index of the job's colour
    live.listen(event => { if (event.kind === "state") this.soon(); });
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.soon(); });
  }

  listen(heard) {
    this.listeners.add(heard);
    return () => this.listeners.delete(heard);
  }

  start() {
    this.stop();
    let looks = 0;
    this.timer = setInterval(() => {
      if (document.hidden) return;
      if (++looks % WHOLE === 0) this.soon();
      else this.look().catch(() => {});
    }, EVERY);
    return this.refresh();
  }

  stop() {
    clearInterval(this.timer);
    clearTimeout(this.due);
    this.due = null;
    this.paged = false;
  }

  soon() {
    this.due ||= setTimeout(() => { this.due = null; this.refresh().catch(() => {}); }, 60);
  }

  /** Load the newest jobs, and those that have not ended however old they are; update the others that were loaded. */
  async refresh() {
    const asked = ++this.asked;
    const page = await ask("GET", `v1/jobs?limit=${PAGE}`), seen = new Set(page.data.map(job => job.id));
    const lists = page.next === null ? [] : await Promise.all(OPEN.map(state => ask("GET", `v1/jobs?state=${state}&limit=${PAGE}`)));
    const open = new Map(lists.flatMap(list => list.data).filter(job => !seen.has(job.id)).map(job => [job.id, job]));
    const oldest = page.data.at(-1)?.created ?? Infinity;
    const beyond = page.next === null ? [] : this.jobs.filter(job => !seen.has(job.id) && !open.has(job.id) && job.created < oldest);
    const now = await Promise.all(beyond.map(job => FINAL.includes(job.state) ? job : ask("GET", jobPath(job.id)).catch(error => error.status === 404 ? null : job)));
    if (asked !== this.asked) return; // a later request replaces this answer
    if (!this.paged) this.older = page.next;
    this.take([...page.data, ...open.values(), ...now.filter(Boolean)]);
  }

  /** Update the running jobs; other changes arrive as events. */
  async look() {
    if (!this.jobs.some(job => job.state === "running")) return;
    const asked = this.asked;
    const {data} = await ask("GET", `v1/jobs?state=running&limit=${PAGE}`);
    if (asked !== this.asked) return;
    const progress = new Map(data.map(job => [job.id, job]));
    this.take(this.jobs.map(job => progress.get(job.id) || job));
  }

  /** Load the next page of jobs. */
  async more() {
    const page = await ask("GET", `v1/jobs?limit=${PAGE}&after=${this.older}`);
    this.asked += 1; // an answer to an earlier request does not have these jobs
    this.paged = true;
    this.older = page.next;
    const known = new Set(page.data.map(job => job.id));
    this.take([...this.jobs.filter(job => !known.has(job.id)), ...page.data]);
  }

  /** Remove a deleted job. */
  drop(id) {
    this.asked += 1; // ignore answers to earlier requests
    this.take(this.jobs.filter(job => job.id !== id));
  }

  take(jobs) {
    jobs.sort((one, other) => other.created - one.created);
    this.jobs = jobs;
    for (const job of [...jobs].reverse()) if (!this.places.has(job.id)) this.places.set(job.id, this.places.size);
    for (const heard of [...this.listeners]) heard(jobs);
  }

  /** The name of a job, or of its usage, in lists without a column for its tenant. */
  named({name, tenant}) { return this.admin && tenant ? `${tenant}/${name}` : name; }

  /** Whether a job says who submitted it. */
  get team() { return this.jobs.some(job => job.submitter); }

  get admin() { return this.jobs.some(job => job.tenant !== null && job.tenant !== undefined); }
}
