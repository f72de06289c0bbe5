// Conversations with the base, the best and the latest version, side by side.
import {ask, jobPath, request, streamed, versionsOf} from "./api.js";
import {add, el, fill, say} from "./dom.js";

/** One of the three conversations; each has its own history, because answers differ. */
class Talk {
  constructor(title, system) {
    this.system = system;
    this.messages = [];
    this.title = el("h3", {}, title);
    this.list = el("div", {class: "talk", role: "log", "aria-label": title, tabindex: 0});
    this.note = el("p", {class: "note", hidden: true});
    this.node = el("section", {class: "card"}, el("div", {class: "head"}, this.title), this.note, this.list);
  }

  rename(title) {
    say(this.title, title);
    this.list.setAttribute("aria-label", title);
  }

  clear() {
    this.messages = [];
    fill(this.list);
  }

  async send(model, text, settings, signal) {
    this.messages.push({role: "user", content: text});
    const answer = el("div", {class: "said assistant"}), mind = el("div", {class: "said thought small soft", hidden: true});
    add(this.list, el("div", {class: "said user"}, text), mind, answer);
    this.list.scrollTop = this.list.scrollHeight;
    let written = "", thought = "";
    try {
      const messages = [...(this.system ? [{role: "system", content: this.system}] : []), ...this.messages];
      const response = await request("POST", "v1/chat/completions", {body: {model, messages, stream: true, ...settings}, signal});
      for await (const event of streamed(response)) {
        if (!event.data || event.data === "[DONE]") continue;
        const {choices, error} = JSON.parse(event.data);
        if (error) throw new Error(error.message);
        written += choices[0]?.delta.content || "";
        thought += choices[0]?.delta.reasoning_content || "";
        say(answer, written);
        say(mind, thought);
        mind.hidden = !thought;
        this.list.scrollTop = this.list.scrollHeight;
      }
      if (!written) say(answer, "(nothing)");
      this.messages.push({role: "assistant", content: written, ...(thought && {reasoning_content: thought})});
    } catch (error) {
      this.messages.pop();
      answer.classList.add("failed");
      say(answer, error.name === "AbortError" ? "stopped" : error.message);
    }
  }
}

/** The tab; `job.versions` gives the versions of an adapter that another tenant shares, as those of `versionsOf`. */
export function chatTab(context, job) {
  const system = job.spec.data?.system || "";
  const talks = {base: new Talk("base", system), best: new Talk("best", system), latest: new Talk("latest", system)};
  const sides = el("div", {class: "sides"}, Object.values(talks).map(talk => talk.node));
  const text = el("textarea", {id: "say", rows: 3, placeholder: "Ask each of them", onkeydown: event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
  }});
  const heat = el("input", {id: "temperature", type: "number", min: 0, max: 2, step: 0.1, value: "0"});
  const most = el("input", {id: "most", type: "number", min: 1, max: 100000, step: 1, value: String(job.spec.sampling?.max_tokens ?? 256)});
  const status = el("p", {class: "small soft", role: "status"});
  const send = el("button", {class: "primary"}, "Send"), stop = el("button", {type: "button", disabled: true}, "Stop");
  const clear = el("button", {type: "button", class: "plain", onclick: () => Object.values(talks).forEach(talk => talk.clear())}, "Clear");
  const example = el("button", {type: "button", class: "plain", hidden: Boolean(job.versions), onclick: fromData}, "A problem from the data");
  const form = el("form", {class: "compose card", onsubmit: event => { event.preventDefault(); ask_(); }},
    el("label", {for: "say"}, "Message"), text,
    el("div", {class: "row"}, el("div", {class: "row"}, field("temperature", heat), field("most tokens", most)), el("div", {class: "row"}, example, clear, stop, send)), status);
  let running = null, place = 0;

  function field(name, input) {
    return el("div", {class: "field"}, el("label", {for: input.id}, name), input);
  }

  async function fromData() {
    try {
      const answer = await ask("GET", jobPath(job.id, "/rollouts?purpose=eval&limit=200"))
        .catch(() => ask("GET", jobPath(job.id, "/rollouts?limit=200")));
      const prompts = [...new Set(answer.data.map(one => one.prompt).filter(Boolean))];
      if (prompts.length) text.value = prompts[place++ % prompts.length];
      text.focus();
    } catch (error) {
      say(status, error.message);
    }
  }

  /** Shows the panes that have a model; returns [model, title] by pane. */
  async function models() {
    const versions = await (job.versions ? job.versions() : versionsOf(job.id));
    const best = versions.find(one => one.best), latest = versions.find(one => one.latest);
    const base = job.base || context.base, same = Boolean(best && latest && best.version === latest.version);
    const note = context.notes[base];
    talks.base.note.hidden = !note;
    say(talks.base.note, note || "");
    const known = {base: [base || "base", `base · ${base}`],
      best: best && [best.shared || `${job.id}@${best.version}`, `${same ? "best and latest" : "best"} · ${best.shared || `version ${best.version}`}`],
      latest: latest && !same && [latest.shared || `${job.id}@${latest.version}`, `latest · ${latest.shared || `version ${latest.version}`}`]};
    for (const [name, model] of Object.entries(known)) {
      talks[name].node.hidden = !model;
      if (model) talks[name].rename(model[1]);
    }
    return known;
  }

  async function ask_() {
    const said = text.value.trim();
    if (!said || running) return;
    running = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    say(status, "");
    try {
      const known = await models();
      const asked = Object.entries(known).filter(([, model]) => model);
      text.value = "";
      if (asked.length === 1) say(status, "There is no saved version yet: only the base answers.");
      const settings = {temperature: Number(heat.value) || 0, max_tokens: Number(most.value) || 256};
      await Promise.all(asked.map(([name, [model]]) => talks[name].send(model, said, settings, running.signal)));
    } catch (error) {
      say(status, error.message);
    }
    running = null;
    send.disabled = false;
    stop.disabled = true;
    text.focus();
  }

  stop.addEventListener("click", () => running?.abort());
  for (const talk of [talks.best, talks.latest]) talk.node.hidden = true;
  return {node: el("div", {}, sides, form), begin() { models().catch(() => {}); }, update() {}, stop() { running?.abort(); }};
}
