// Requests to the service. An API key is kept only in this tab's storage and sent in a header; the key of a sign-in is in
// a cookie that no script can read, and that the service accepts only together with the header X-Motet-Page.

const KEY = "motet.key";
const QUIET = 40000; // milliseconds; the service sends something every fifteen seconds

/** An error response; `status` is 0 if there was no response. */
export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const session = {
  get key() { return sessionStorage.getItem(KEY) || ""; },
  set key(text) { text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY); },
  locked: () => {}, // called when the service rejects the key
};

/** Send a request; throws `Refused` unless it succeeds. After a 429, retries up to three times, after Retry-After. */
export async function request(method, path, options = {}) {
  for (let again = 3; ; again--) {
    const response = await send(method, path, options);
    if (response.ok) return response;
    if (response.status === 429 && again) {
      await new Promise(done => setTimeout(done, 1000 * Math.min(Number(response.headers.get("Retry-After")) || 1, 10)));
      continue;
    }
    const reason = await response.json().then(answer => answer.error.message, () => `The service answered ${response.status}.`);
    if (response.status === 401) session.locked(reason);
    throw new Refused(reason, response.status);
  }
}

/** Send a request with the key or the cookie; returns the response whatever its status. */
export async function send(method, path, {body, headers = {}, signal}) {
  const sent = {...headers, "X-Motet-Page": "1"};
  if (session.key) sent.Authorization = `Bearer ${session.key}`;
  const form = body instanceof FormData; // the browser writes its type, with the boundary
  if (body !== undefined && !form) sent["Content-Type"] = "application/json";
  try {
    return await fetch(path, {
      method, headers: sent, signal, body: body === undefined || form ? body : JSON.stringify(body),
      cache: "no-store", credentials: "same-origin", redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The service does not answer.", 0);
  }
}

/** Send a request and return the JSON of its answer; null for 204. */
export async function ask(method, path, body, headers) {
  const response = await request(method, path, {body, headers});
  return response.status === 204 ? null : response.json();
}

/** URL of a job's resources. */
export const jobPath = (id, rest = "") => `v1/jobs/${encodeURIComponent(id)}${rest}`;

/** The rows of a list, page by page, until there are `most`. */
export async function rowsOf(path, most = Infinity) {
  const all = [], more = path.includes("?") ? "&" : "?";
  for (let after = ""; after != null && all.length < most;) {
    const {data, next} = await ask("GET", `${path}${after && `${more}after=${encodeURIComponent(after)}`}`);
    all.push(...data);
    after = next;
  }
  return all;
}

/** All stored versions of a job, oldest first. */
export const versionsOf = id => rowsOf(jobPath(id, "/versions"));

/** Yield the server-sent events of a response as {id, event, data}; a keep-alive has no data. */
export async function* streamed(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) yield readEvent(part);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function readEvent(text) {
  const event = {id: null, event: "message", data: ""};
  for (const line of text.split("\n")) {
    const colon = line.indexOf(": ");
    if (colon > 0) event[line.slice(0, colon)] = line.slice(colon + 2);
  }
  return event;
}

/** Events of all jobs while the page is open; resumes after the last event when a connection is lost. */
export class Live {
  constructor() {
    this.listeners = new Set();
    this.lost = () => {}; // called with true when the connection is lost, with false when it works
    this.last = null;
  }

  /** Call `heard` with every event; returns a function that stops it. */
  listen(heard) {
    this.listeners.add(heard);
    return () => this.listeners.delete(heard);
  }

  /** Connect; resolves when events arrive, so that data which is requested afterwards and later events leave no gap. */
  start() {
    this.stop();
    const running = this.running = new AbortController();
    return new Promise(begun => this.keep(running.signal, begun));
  }

  stop() {
    this.running?.abort();
    this.running = null;
  }

  async keep(signal, begun) {
    let wait = 500;
    while (!signal.aborted) {
      const attempt = new AbortController(), give = () => attempt.abort();
      signal.addEventListener("abort", give);
      try {
        await this.once(attempt, () => { wait = 500; begun(); });
      } catch (error) {
        if (signal.aborted || error.status === 401) return;
      } finally {
        begun();
        signal.removeEventListener("abort", give);
        attempt.abort();
      }
      if (signal.aborted) return;
      this.lost(true);
      await new Promise(done => setTimeout(done, wait));
      wait = Math.min(wait * 1.7, 8000);
    }
  }

  async once(attempt, fine) {
    const headers = this.last === null ? {} : {"Last-Event-ID": String(this.last)};
    let watch = setTimeout(() => attempt.abort(), QUIET);
    const alive = () => {
      clearTimeout(watch);
      watch = setTimeout(() => attempt.abort(), QUIET);
      this.lost(false);
      fine();
    };
    try {
      const response = await request("GET", "v1/events/stream", {headers, signal: attempt.signal});
      alive();
      for await (const event of streamed(response)) {
        alive();
        if (event.id !== null) this.last = Number(event.id);
        if (!event.data) continue;
        const parsed = JSON.parse(event.data);
        if (parsed.error) return; // the key was revoked or has expired: the next attempt is refused
        for (const heard of [...this.listeners]) heard(parsed);
      }
    } finally {
      clearTimeout(watch);
    }
  }
}
