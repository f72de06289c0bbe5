// Adapters that other tenants share: a list of them, and a page to try one.
import {ask} from "./api.js";
import {chatTab} from "./chat.js";
import {add, el, fill} from "./dom.js";
import {age} from "./words.js";

const named = share => `${share.owner}/${share.name}`;

/** What others share with this tenant, by name; those that have no version yet are not there. */
async function received() {
  const found = new Map();
  for (let after = ""; after !== null;) {
    const page = await ask("GET", `v1/shares${after && `?after=${encodeURIComponent(after)}`}`);
    for (const share of page.received) if (share.models.length) found.set(named(share), share);
    after = page.next;
  }
  return found;
}

/** A card that lists them; hidden without any. */
export function sharedCard(may) {
  const body = el("tbody"), node = el("section", {class: "card", hidden: true}, el("div", {class: "head"}, el("h2", {}, "Shared with you")),
    el("table", {class: "jobs"}, el("thead", {}, el("tr", {}, ["adapter", "base", "since"].map(text => el("th", {scope: "col"}, text)))), body));
  received().then(found => {
    node.hidden = !found.size;
    fill(body, [...found.values()].map(share => el("tr", {},
      el("td", {class: "name"}, may("completions") ? el("a", {href: `#/shared/${encodeURIComponent(share.owner)}/${encodeURIComponent(share.name)}`}, named(share)) : named(share)),
      el("td", {class: "small soft", data: {label: "base"}}, share.base || "–"), el("td", {class: "number", data: {label: "since"}}, `${age(share.created)} ago`))));
  }, () => {});
  return node;
}

/** The page on which one of them answers beside its base. */
export function sharedPage(context, owner, name) {
  const title = `${owner}/${name}`, node = el("div");
  let talk = null;
  async function begin() {
    const share = (await received()).get(title);
    if (!share) throw new Error(`${title} is not shared with you.`);
    const at = word => share.models.find(model => model.endsWith(`@${word}`));
    const best = at("best") || share.models.at(-1), latest = at("latest") || best;
    const versions = [{version: "best", best: true, shared: best}, ...(latest === best ? [] : [{version: "latest", latest: true, shared: latest}])];
    talk = chatTab(context, {id: title, base: share.base, spec: {}, versions: async () => versions});
    add(node, talk.node);
    talk.begin();
  }
  add(node, el("p", {class: "crumbs"}, el("a", {href: "#/"}, "Jobs"), el("span", {class: "faint"}, " /")), el("div", {class: "title"}, el("h1", {}, title)));
  begin().catch(error => add(node, el("p", {class: "problem", role: "alert"}, error.message)));
  return {node, title, stop() { talk?.stop(); }};
}
