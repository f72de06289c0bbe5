// The page to write, check and submit a job.
import {ask} from "./api.js";
import {el, say} from "./dom.js";

const EXAMPLE = `name: sort
data: toy:sort_letters
reward: exact
steps: 25
sampling: {max_tokens: 16}
adapter: {rank: 16}
eval: {every: 5}
`;

function once() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map(byte => byte.toString(16).padStart(2, "0")).join("");
}

/** The page. */
export function submitPage(context) {
  const text = el("textarea", {id: "job", class: "editor", spellcheck: "false", "aria-describedby": "problem", value: context.draft || EXAMPLE});
  const problem = el("p", {id: "problem", class: "problem", role: "alert"}), fine = el("p", {class: "good", role: "status"});
  const check = el("button", {type: "button", onclick: () => work(false)}, "Check"), send = el("button", {class: "primary"}, "Submit");
  const file = el("input", {id: "rows", type: "file", accept: ".jsonl,.parquet", onchange: upload});
  text.addEventListener("input", () => { text.removeAttribute("aria-invalid"); say(problem, ""); say(fine, ""); context.draft = text.value; });

  /** Store a file of rows, and say what to write to train on it. */
  async function upload() {
    const [rows] = file.files;
    if (!rows) return;
    say(problem, "");
    say(fine, `Uploading ${rows.name} …`);
    try {
      const form = new FormData();
      form.append("file", rows);
      const stored = await ask("POST", "v1/files", form);
      say(fine, `${rows.name} is stored. Write data: ${stored.id}`);
    } catch (error) {
      say(fine, "");
      say(problem, error.message);
    }
    file.value = "";
  }

  async function work(submit) {
    check.disabled = send.disabled = true;
    say(problem, "");
    say(fine, "");
    try {
      const {jobs} = await ask("POST", "v1/check", {text: text.value});
      const names = jobs.map(job => job.name).join(", ");
      if (submit) {
        const asked = {jobs: jobs.map(job => ({job}))};
        const {data} = await ask("POST", "v1/submissions", asked, {"Idempotency-Key": once()});
        context.draft = "";
        context.board.soon();
        location.hash = data.length === 1 ? `#/job/${encodeURIComponent(data[0].id)}` : "#/";
        return;
      }
      say(fine, jobs.length === 1 ? `${names} can be submitted.` : `${jobs.length} jobs can be submitted: ${names}.`);
    } catch (error) {
      text.setAttribute("aria-invalid", "true");
      say(problem, error.message);
      text.focus();
    }
    check.disabled = send.disabled = false;
  }

  const form = el("form", {class: "card stack", onsubmit: event => { event.preventDefault(); work(true); }},
    el("div", {class: "field"}, el("label", {for: "job"}, "Job, or job file: YAML or JSON"), text), el("div", {class: "outcome"}, problem, fine),
    el("div", {class: "field"}, el("label", {for: "rows"}, "Upload data: a .jsonl or .parquet file of rows"), file),
    el("div", {class: "row"}, send, check, el("span", {class: "small soft"}, "The text is that of motet run and motet submit.")));
  return {node: el("div", {class: "stack"}, el("h1", {}, "New job"), form), title: "New job", stop() {}};
}
