"use strict";
// One episode: its facts, its group, every turn with its tokens, the patch, the tests.

const MOST_CHARS = 20000;
const SHADES = [0.9, 0.5, 0.2, 0.05, 0.01]; // a token below the n-th probability has at least the n-th shade
const SHADE_NAMES = ["90 % or more", "50 - 90 %", "20 - 50 %", "5 - 20 %", "1 - 5 %", "below 1 %"];

async function showEpisode(here) {
  const rows = await rowsOfRun();
  const row = rows.find((each) => each.id === here.rest);
  if (!row) throw new Error(`The report lists no episode ${here.rest}.`);
  table.opened = row.id;
  if (!table.fitting.includes(row)) table.fitting = rows;
  if (!row.isWhole) return [bar(row), absent(row)];
  const episode = await load(row.id);
  loaded.delete(row.id);
  return [
    bar(row), title(row, episode), facts(row, episode), group(row, rows), legends(episode),
    ...turns(episode), ...results(episode),
  ];
}

function bar(row) {
  const at = table.fitting.indexOf(row);
  const link = (text, other, key) => other
    ? make("a", {href: address(`episode/${other.id}`), title: key}, text) : make("span", {}, text);
  return make("div", {class: "bar"},
    make("a", {href: lastTable}, "\u2190 table"),
    link("previous", table.fitting[at - 1], "k"), link("next", table.fitting[at + 1], "j"),
    make("span", {}, `${number(at + 1)} of ${number(table.fitting.length)}`));
}

function absent(row) {
  const steps = row.step === null ? "--episodes all" : `--steps ${row.step}`;
  return make("p", {}, "This episode is listed only: it is not among those that the report holds whole, or " +
    "no attempt at it came back. To see all episodes of its step, write the report again with ", make("code", {}, steps), ".");
}

function title(row, episode) {
  const advantage = episode.advantage === null ? null : badge(`advantage ${signed(episode.advantage)}`, sign(episode));
  return make("h2", {class: "title"}, episode.name, " ", make("span", {class: "task"}, episode.task), " ",
    badge(episode.outcome, episode.outcome), badge(episode.reward === null ? "no reward" : `reward ${number(episode.reward)}`),
    badge(episode.exit), advantage, badge(episode.untrained ? "not trained" : "trained", episode.untrained ? "dim" : sign(episode)));
}

function badge(text, kind = "") {
  return make("span", {class: `badge ${kind}`}, text);
}

function sign(episode) {
  return episode.advantage > 0 ? "up" : episode.advantage < 0 ? "down" : "flat";
}

function signed(value) {
  return (value > 0 ? "+" : "") + number(value, 3);
}

function facts(row, episode) {
  const seconds = episode.seconds.map(([name, value]) => `${name.replace(/_s$/, "")} ${value.toFixed(1)}`).join(", ");
  const versions = [...new Set(episode.turns.flatMap((turn) => turn.versions.flatMap(([, , oldest, newest]) => [oldest, newest])))];
  const list = [
    ["not trained because", episode.untrained],
    ["error", episode.error],
    ["step", row.step === null ? "" : String(row.step)],
    ["decoding", row.sampling],
    ["seconds", seconds],
    ["weights", versions.sort().join(", ")],
    ["sampled tokens", number(row.sampled_tokens)],
    ["attempt, seed", `${episode.attempt}, ${episode.seed}`],
    ["sampling", Object.entries(episode.sampling).map(([name, value]) => `${name} ${value}`).join(", ")],
    ["recorder", episode.counts.map(([name, count]) => `${name} ${count}`).join(", ")],
    ["worker", episode.worker],
    ["grader checks", episode.self_checks.map((fault) => fault || "right").join(", ")],
  ];
  return make("dl", {class: "facts"}, ...list.filter(([, value]) => value).flatMap(([name, value]) =>
    [make("dt", {}, name), make("dd", {}, value)]));
}

function group(row, rows) {
  const members = rows.filter((each) => each.table === row.table && each.group_id === row.group_id);
  return make("p", {class: "group"}, row.split === "eval" ? "Its task: " : "Its group: ", ...members.flatMap((each) => [
    make("a", {class: `badge ${each.outcome} ${each === row ? "here" : ""}`, href: address(`episode/${each.id}`)},
      `${each.sampling} ${each.index}: ${each.reward === null ? "none" : number(each.reward, 3)}`.trim()), " "]));
}

function legends(episode) {
  const shades = SHADE_NAMES.map((name, n) => make("span", {class: `token p${n}`}, name));
  const masks = episode.untrained ? [] : [" Trained tokens: ", make("span", {class: `token trained ${sign(episode)}`},
    `advantage ${signed(episode.advantage)}`), " others: ", make("span", {class: "token dim"}, "no loss")];
  return make("p", {class: "shades"}, "Probability of a token: ", ...shades.flatMap((each) => [each, " "]), ...masks);
}

// Turns that belong to the conversation stand with their messages; without such a pairing the messages come first.
function turns(episode) {
  const isPaired = episode.turns.some((turn) => turn.answer !== null);
  const parts = isPaired ? [] : [make("h3", {}, "Conversation"), ...episode.messages.map((message) => block(message))];
  let next = 0;
  episode.turns.forEach((turn, index) => {
    const before = [];
    if (turn.answer !== null) {
      before.push(...episode.messages.slice(next, turn.answer).map((message) => block(message)));
      next = turn.answer + 1;
    }
    parts.push(section(episode, turn, index, before));
  });
  if (isPaired) parts.push(...episode.messages.slice(next).map((message) => block(message)));
  return parts;
}

function section(episode, turn, index, before) {
  const isSide = turn.answer === null && episode.turns.some((each) => each.answer !== null);
  const kinds = [isSide ? badge(turn.parent === null ? "side chain" : `continues turn ${turn.parent}`, "dim") : null,
    turn.delivered ? null : badge("not delivered", "dim"),
    turn.trained.length || episode.untrained ? null : badge("no loss", "dim"),
    turn.finish === "stop" ? null : badge(turn.finish, "dim")];
  const versions = turn.versions.map(([, , oldest, newest]) => (oldest === newest ? newest : `${oldest} .. ${newest}`));
  const mean = turn.logprobs.reduce((sum, value) => sum + value, 0) / 1000 / (turn.logprobs.length || 1);
  const about = `${number(turn.read)} tokens read, ${number(turn.ids.length)} sampled, mean log-probability ${mean.toFixed(3)}, ` +
    `${turn.seconds.toFixed(1)} s, ${[...new Set(versions)].join(", ")} on ${turn.engine}`;
  const message = turn.answer === null ? null : episode.messages[turn.answer];
  return make("section", {class: `turn ${isSide ? "side" : ""}`, tabindex: "-1"},
    make("h3", {}, `Turn ${index} `, ...kinds), make("p", {class: "about"}, about), ...before,
    turn.prompt ? folded(`exact prompt, ${number(turn.read)} tokens`, () => text(turn.prompt)) : null,
    // Without a tokenizer the tokens are numbers, so that the answer's text is nowhere else.
    message && message[1] && !Object.keys(episode.words).length ? text(message[1]) : null,
    tokens(episode, turn), message ? calls(message) : null);
}

function block(message) {
  const [role, content] = message;
  return make("div", {class: `message ${role}`}, make("b", {}, role), content ? text(content) : null, calls(message));
}

function calls([, , list]) {
  return make("div", {}, ...list.map(([name, values]) => make("div", {class: "call"}, make("b", {}, `\u25b8 ${name}`),
    ...values.map(([key, value]) => make("div", {class: "argument"}, key ? make("i", {}, key) : null,
      value.includes("\n") || value.length > 80 ? text(value) : make("code", {}, value))))));
}

// A long text is cut, so that a line of ten megabytes does not stop the browser; a button shows all of it.
function text(value) {
  const element = make("pre", {class: "text"}, value.slice(0, MOST_CHARS));
  if (value.length > MOST_CHARS) {
    element.append(make("button", {onclick: () => { element.textContent = value; }},
      `show all ${number(value.length)} characters`));
  }
  return element;
}

function folded(summary, content) {
  const details = make("details", {}, make("summary", {}, summary));
  details.addEventListener("toggle", () => details.append(content()), {once: true});
  return details;
}

function tokens(episode, turn) {
  const versionAt = (n) => turn.versions.find(([start, end]) => start <= n && n < end);
  const isTrained = (n) => turn.trained.some(([start, end]) => start <= n && n < end);
  const starts = new Set(turn.versions.length > 1 ? turn.versions.map(([start]) => start) : []);
  const kind = episode.untrained ? "" : sign(episode);
  const parts = turn.ids.flatMap((id, n) => {
    const logprob = turn.logprobs[n] / 1000;
    const word = turn.odd[n] ?? episode.words[id] ?? `${id} `;
    const version = versionAt(n);
    const shade = SHADES.filter((limit) => !(Math.exp(logprob) >= limit)).length;
    const mask = isTrained(n) ? `trained ${kind}` : episode.untrained ? "" : "dim";
    const token = make("span", {class: `token p${shade} ${mask}`}, visible(word));
    token.about = `${JSON.stringify(word)}  id ${id}\nlog-probability ${logprob.toFixed(3)}, ` +
      `${number(100 * Math.exp(logprob), 3)} %\n${version ? version[3] : "no version"}, ` +
      (isTrained(n) ? `trained, advantage ${signed(episode.advantage)}` : "not trained");
    return starts.has(n) && version ? [make("span", {class: "version"}, version[3]), token] : [token];
  });
  return make("pre", {class: "text tokens", onpointerover: tip, onpointerout: tip}, ...parts);
}

function visible(word) {
  return word === "" ? "\u00b7" : word.replaceAll("\n", "\u21b5\n").replaceAll("\t", "\u2192\t");
}

function tip(event) {
  const box = byId("tip");
  box.hidden = event.type === "pointerout" || !event.target.about;
  if (box.hidden) return;
  box.textContent = event.target.about;
  const at = event.target.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(at.left, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${at.bottom + box.offsetHeight + 8 > innerHeight ? at.top - box.offsetHeight - 4 : at.bottom + 4}px`;
}

function results(episode) {
  const names = (kind, list, open) => make("details", {open},
    make("summary", {}, `${number(list.length)} ${kind}`),
    make("ul", {class: "tests"}, ...list.slice(0, 1000).map((name) => make("li", {class: kind}, name)),
      list.length > 1000 ? make("li", {}, `and ${number(list.length - 1000)} more`) : null));
  return [
    make("h3", {}, "Tests"), names("failed", episode.failed, true), names("passed", episode.passed, false),
    ...(episode.detail ? [make("h3", {}, "What the grader says"), text(episode.detail)] : []),
    make("h3", {}, "Submission"),
    episode.submission ? diff(episode.submission) : make("p", {}, "Nothing was changed."),
  ];
}

function diff(patch) {
  const kinds = {"+": "added", "-": "removed", "@": "hunk"};
  if (patch.length > MOST_CHARS) return text(patch);
  return make("pre", {class: "text"}, ...patch.split("\n").map((line) =>
    make("span", {class: kinds[line[0]] || ""}, `${line}\n`)));
}

function step(by) {
  const all = [...document.querySelectorAll(".turn")];
  const at = all.indexOf(document.activeElement);
  const next = all[Math.max(0, Math.min(all.length - 1, at + by))];
  next?.focus({preventScroll: true});
  next?.scrollIntoView({block: "start"});
}

function neighbour(by) {
  const at = table.fitting.findIndex((row) => row.id === table.opened);
  if (table.fitting[at + by]) open(at + by);
}

KEYS.episode = {
  j: () => neighbour(1),
  k: () => neighbour(-1),
  ArrowRight: () => step(1),
  ArrowLeft: () => step(-1),
  Escape: () => { location.hash = lastTable; },
};
