// How to call the adapter from other programs: a request with curl, and with OpenAI's client.
import {versionsOf} from "./api.js";
import {copyOf, el, fill, say} from "./dom.js";

const shell = text => `'${text.replaceAll("'", "'\\''")}'`;

/** Both requests for a model `name@version`; a job without a chat template gets a completion request instead of chat. */
export function snippets(address, model, {keys, chat, system}) {
  const messages = [...(system ? [{role: "system", content: system}] : []), {role: "user", content: "Hello"}];
  const asked = chat ? {model, messages} : {model, prompt: "Hello", max_tokens: 64};
  const path = chat ? "chat/completions" : "completions";
  const curl = [`curl ${address}/${path}`, ...(keys ? ['-H "Authorization: Bearer $MOTET_API_KEY"'] : []),
    "-H 'Content-Type: application/json'", `-d ${shell(JSON.stringify(asked))}`].join(" \\\n  ");
  const given = Object.entries(asked).map(([name, value]) => `    ${name}=${JSON.stringify(value)},`).join("\n");
  const python = `${keys ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(address)}, api_key=${keys ? 'os.environ["MOTET_API_KEY"]' : '"none"'})
answer = client.${chat ? "chat.completions" : "completions"}.create(\n${given}\n)\nprint(answer.choices[0].${chat ? "message.content" : "text"})`;
  return {curl, python};
}

/** The tab. */
export function useTab(context, job) {
  const address = new URL("v1", document.baseURI).href, name = context.keys && job.tenant ? job.id : job.name; // admins address other tenants' jobs by id
  const versions = el("select", {id: "asked", onchange: draw}), status = el("p", {class: "soft", role: "status"});
  const texts = {curl: el("pre", {class: "text", tabindex: 0}), python: el("pre", {class: "text", tabindex: 0})};
  const both = el("div", {hidden: true}, Object.entries({curl: "curl", python: "Python (openai)"}).map(([key, title]) =>
    el("section", {class: "snippet"}, el("div", {class: "head"}, el("h3", {}, title), copyOf(texts[key], `Copy ${key}`)), texts[key])));

  function draw() {
    const {data} = job.spec, made = snippets(address, `${name}@${versions.value}`, {keys: context.keys, chat: data.chat_template !== false, system: data.system});
    for (const [key, text] of Object.entries(made)) say(texts[key], text);
  }

  async function begin() {
    const data = await versionsOf(job.id);
    say(status, data.length ? "" : "No version is saved yet.");
    both.hidden = !data.length;
    if (!data.length) return;
    const chosen = versions.value, best = data.find(one => one.best);
    fill(versions, [...data].reverse().map(one => el("option", {value: String(one.version)}, `version ${one.version}${one.best ? " · best" : ""}${one.untrained ? " · untrained" : ""}${one.latest ? " · latest" : ""}`)));
    versions.value = data.some(one => String(one.version) === chosen) ? chosen : String((best || data.at(-1)).version);
    draw();
  }

  return {node: el("div", {class: "card"}, el("div", {class: "head"}, el("h2", {}, "Ask this adapter"),
    el("div", {class: "row"}, el("label", {for: "asked"}, "Version"), versions)), status, both), begin, update() {}, stop() {}};
}
