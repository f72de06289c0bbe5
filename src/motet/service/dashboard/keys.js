// API keys that the user may see: creates and revokes them. The text of a key is shown once.
import {ask, rowsOf} from "./api.js";
import {el, fill, say, sure} from "./dom.js";
import {age, clock} from "./words.js";

const ROLES = ["reader", "member", "tenant-admin", "admin"]; // in order of rights, least first

/** Show a new key; it cannot be shown again. */
function reveal({name, key}) {
  const copy = navigator.clipboard && el("button", {value: "copy", onclick: event => { event.preventDefault(); navigator.clipboard.writeText(key).then(() => say(copy, "Copied")); }}, "Copy");
  const dialog = el("dialog", {"aria-labelledby": "made"}, el("h2", {id: "made"}, `The key ${name}`),
    el("p", {class: "soft"}, "Keep it now: it is shown only once."), el("pre", {class: "text key", tabindex: 0}, key),
    el("form", {method: "dialog", class: "row"}, copy, el("button", {class: "primary"}, "Done")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

const ended = key => key.revoked !== null || (key.expires !== null && key.expires <= Date.now() / 1000);

function state(key) {
  if (ended(key)) return key.revoked !== null ? "revoked" : "expired";
  return key.expires === null ? "in use" : `until ${clock(key.expires)}`;
}

/** The page. */
export function keysPage({me}) {
  const rank = role => ROLES.indexOf(role), admin = me.role === "admin";
  const body = el("tbody"), problem = el("p", {class: "problem", role: "alert"});
  const name = el("input", {id: "name", maxlength: 100, required: true, autocomplete: "off"});
  const role = el("select", {id: "role"}, ROLES.filter(one => rank(one) <= rank(me.role)).map(one => el("option", {value: one, selected: one === "member"}, one)));
  const days = el("input", {id: "days", type: "number", min: 1, max: 36500, step: "any"});
  const send = el("button", {class: "primary"}, "Make a key");
  const note = admin ? "Without days the key does not expire." : me.signed_in ? "It ends when you sign out, or with your sign-in." : "It ends with the key that you use now.";
  const headings = ["name", "role", ...(admin ? ["tenant"] : []), "made", "state", ""];

  const field = (text, input) => el("div", {class: "field"}, el("label", {for: input.id}, text), input);

  const complain = work => work.catch(error => say(problem, error.message));

  function row(key) {
    const own = key.id === me.id, over = rank(key.role) > rank(me.role);
    const revoke = async () => {
      if (!await sure(`Revoke ${key.name || key.id}?`, "It is refused from now on, and so are the keys that were made with it.", "Revoke the key")) return;
      await ask("DELETE", `v1/keys/${encodeURIComponent(key.id)}`);
      await refresh();
    };
    return el("tr", {}, el("td", {class: "name"}, el("b", {}, key.name || key.id), own && el("span", {class: "badge"}, "you"), el("span", {class: "small faint id"}, key.id)),
      el("td", {data: {label: "role"}}, key.role, key.scope && el("span", {class: "small soft"}, ` only ${key.scope.join(", ")}`), key.signed_in && el("span", {class: "small soft"}, " sign-in"),
        key.submitter && key.submitter !== key.name && el("span", {class: "small soft"}, ` of ${key.submitter}`)),
      admin && el("td", {data: {label: "of"}}, key.tenant), el("td", {class: "number", data: {label: "made"}}, `${age(key.created)} ago`),
      el("td", {data: {label: "state"}}, state(key)),
      el("td", {class: "right"}, own || over || ended(key) ? null
        : el("button", {type: "button", class: "danger", "aria-label": `Revoke ${key.name || key.id}`, onclick: () => complain(revoke())}, "Revoke")));
  }

  async function refresh() {
    fill(body, (await rowsOf("v1/keys?limit=1000")).reverse().map(row));
  }

  async function make() {
    send.disabled = true;
    say(problem, "");
    const made = ask("POST", "v1/keys", {name: name.value.trim(), role: role.value, expires_days: days.value ? Number(days.value) : null});
    await complain(made.then(key => { name.value = ""; reveal(key); return refresh(); }));
    send.disabled = false;
  }

  const form = el("form", {class: "card", onsubmit: event => { event.preventDefault(); make(); }},
    el("div", {class: "head"}, el("h2", {}, "New key")), el("div", {class: "choose"}, field("What it is for", name), field("Role", role), field("Days until it ends", days), send), el("p", {class: "small soft"}, note), problem);
  const list = el("section", {class: "card"}, el("div", {class: "head"}, el("h2", {}, "Keys")),
    el("table", {class: "jobs"}, el("thead", {}, el("tr", {}, headings.map(text => el("th", {scope: "col"}, text || el("span", {class: "unseen"}, "what to do"))))), body));
  complain(refresh());
  return {node: el("div", {class: "stack"}, el("h1", {class: "unseen"}, "Keys"), form, list), title: "Keys", stop() {}};
}
