// The section with loadgen's figures, above Locust's tables during a run. It requests the run's figures once a second, draws them, and loads nothing else.
(() => {
  "use strict";
  const home = document.getElementById("loadgen");
  const SHARES = ["p50", "p90", "p95", "p99"];
  const CHARTS = [
    { title: "Time to first token", unit: "ms", times: 1000, lines: [["ttft_s_p50", "p50"], ["ttft_s_p99", "p99"]] },
    { title: "Time per output token", unit: "ms", times: 1000, lines: [["tpot_s_p50", "p50"], ["tpot_s_p99", "p99"]] },
    { title: "Output tokens per second", unit: "tokens/s", times: 1, lines: [["tokens_per_s", "arriving"]] },
    { title: "Streams in flight", unit: "requests", times: 1, lines: [["streams", "streaming"], ["waiting", "waiting for the first token"]] },
    { title: "Requests in the server", unit: "requests", times: 1, lines: [["server_running", "running"], ["server_waiting", "waiting in its queue"]] },
    { title: "KV cache in use", unit: "%", times: 100, lines: [["kv_used", "used"]] },
  ];
  const SPANS = { last: "Last 10 s", level: "Since the number of users changed", run: "Whole run" };
  let points = [], seen = 0, folder = null, span = "level";

  // Text is inserted as text nodes, so that text from a server is never markup.
  function node(tag, attributes, ...children) {
    const svg = ["svg", "path", "line", "text", "circle", "title"].includes(tag);
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  const number = value => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 2 : value < 100 ? 1 : 0 });
  const tokens = value => value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: 1 });
  const milliseconds = seconds => seconds === null ? "–" : (seconds * 1000).toLocaleString("en", { minimumFractionDigits: 3, maximumFractionDigits: 3 });

  function isDark() {
    const parts = (getComputedStyle(document.body).backgroundColor.match(/[\d.]+/g) || [255, 255, 255]).map(Number);
    return parts.length < 4 || parts[3] > 0 ? parts[0] + parts[1] + parts[2] < 380 : false;
  }

  function facts(live) {
    const line = node("div", { class: "facts line", id: "loadgen-facts" }, node("h1", {}, "loadgen"));
    if (!live.server) { line.append("No server."); return line; }
    const { name, version, model, url, simulated, speed } = live.server;
    if (simulated) line.append(node("span", { class: "simulated" }, "SIMULATED"));
    const pace = speed === null ? " at unknown speed" : speed === 1 ? "" : ` at ${speed} times speed`;
    line.append(node("span", {}, `${name}${simulated ? pace : ` ${version}`} · ${model} · ${url}`));
    if (!live.run) { line.append(node("span", { class: "note" }, "Start to see exact latencies here.")); return line; }
    const client = live.run.client, limited = client.reasons.length > 0;
    line.append(node("span", { class: limited ? "limited" : "ok", id: "loadgen-verdict" },
      limited ? `the client was the limit: ${client.reasons.join("; ")}` : "valid: the client is not the limit"));
    line.append(node("span", { class: "note" }, client.source));
    line.append(node("a", { href: "./loadgen/report", id: "loadgen-report", download: "" }, "Download report"));
    line.append(node("a", { href: "./loadgen/run", download: "" }, "Run file"));
    line.append(node("span", { class: "note" }, `folder ${live.run.folder}`));
    return line;
  }

  function spans() {
    const choices = Object.entries(SPANS).map(([name, title]) => {
      const button = node("input", { type: "radio", name: "loadgen-span", value: name });
      button.checked = name === span;
      return node("label", {}, button, ` ${title}`);
    });
    const box = node("fieldset", {}, node("legend", {}, "Latencies of"), ...choices);
    box.addEventListener("change", event => { span = event.target.value; look(); });
    return [box];
  }

  function latencies(run, shown) {
    const time = { last: "of the last 10 s", run: "of the whole run",
      level: `since there were ${run.level.users} users${run.level.at ? ` (from ${run.level.at} s)` : ""}` }[shown];
    const head = node("tr", {}, ...["Latency", ...SHARES, "max", "mean", "samples"].map(title => node("th", { "data-figure": title }, title)));
    const rows = run.latency.map(row => {
      const cells = [...SHARES, "max", "mean"].map(name =>
        node("td", { "data-seconds": row[name] === null ? "" : row[name], "data-figure": name },
          (row.unit === "tokens" ? tokens(row[name]) : milliseconds(row[name])) + (row[name] !== null && row.thin.includes(name) ? "*" : "")));
      const title = row.left_out ? `${row.title} (newest; ${row.left_out.toLocaleString("en")} older left out)` : row.title;
      return node("tr", { "data-metric": row.name }, node("td", {}, title), ...cells, node("td", { "data-figure": "n" }, row.n.toLocaleString("en")));
    });
    const thin = run.latency.some(row => row.n && row.thin.length) ? " * too few samples: p99 takes 662 requests, p95 130, p90 64." : "";
    return [node("h2", {}, `Exact latencies ${time}, in ms${run.latency.some(row => row.unit === "tokens") ? " (reasoning tokens: a number)" : ""}`),
      node("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Latencies" }, node("table", { id: "loadgen-latency" }, node("thead", {}, head), node("tbody", {}, ...rows))),
      node("p", { class: "note" },
        `Of complete requests that ended in this time. Locust's tables below are of the whole run and round.${thin}`),
      node("p", { id: "loadgen-counts" }, `Since Start: ${counts(run.requests)}, ${run.tokens.toLocaleString("en")} tokens.`)];
  }

  function counts(requests) {
    const states = ["complete", "truncated", "failed", "rejected"].map(state => `${(requests[state] || 0).toLocaleString("en")} ${state}`);
    if (requests.cut_off) states.push(`${requests.cut_off.toLocaleString("en")} cut off as their users stopped`);
    return `${states.join(", ")}, ${requests.in_flight} in flight, ${requests.users} users`;
  }

  function failures(run) {
    if (!run.failures.length) return [];
    const rows = run.failures.map(({ reason, message, n }) => node("tr", {}, node("td", {}, reason), node("td", {}, n.toLocaleString("en")), node("td", {}, message)));
    const head = node("tr", {}, ...["Reason", "Requests", "Message, for example"].map(title => node("th", {}, title)));
    return [node("h2", {}, "Failures"),
      node("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Failures" }, node("table", { class: "failures" }, node("thead", {}, head), node("tbody", {}, ...rows)))];
  }

  // Charts of the server's metrics are left out if the server reports none.
  const hasValues = ({ lines }) => !lines[0][0].startsWith("server_") && lines[0][0] !== "kv_used"
    || points.some(point => lines.some(([name]) => point[name] !== null && point[name] !== undefined));

  const HEIGHT = 212, LEFT = 52, BOTTOM = 22, TOP = 20;

  function chart({ title, unit, times, lines }) {
    const WIDTH = Math.max(280, home.clientWidth / (home.clientWidth > 900 ? 2 : 1) - 56);
    const values = lines.map(([name]) => points.map(point => point[name] === null || point[name] === undefined ? null : point[name] * times));
    const most = Math.max(...values.flat().filter(value => value !== null), 0) || 1;
    const step = niceStep(most / 4), top = Math.ceil(most / step) * step;
    const first = points.length ? points[0].at : 0, span = Math.max(10, points.length - 1);
    const x = at => LEFT + (at - first) / span * (WIDTH - LEFT - 6), y = value => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
    const drawn = node("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}, ${unit}, ${said(lines, values)}` });
    for (let value = 0; value <= top * 1.0001; value += step) {
      drawn.append(node("line", { class: "grid", x1: LEFT, x2: WIDTH - 6, y1: y(value), y2: y(value) }),
        node("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, number(value)));
    }
    const every = niceStep(span / 6);
    for (let at = Math.ceil(first / every) * every; at <= first + span; at += every)
      drawn.append(node("text", { x: x(at), y: HEIGHT - 6, "text-anchor": "middle" }, `${number(at)} s`));
    let free = 0;
    for (const { at, users } of levels()) {  // mark each change of the number of users
      drawn.append(node("line", { class: "level", x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM }));
      const text = free ? `${users}` : `${users} users`, from = Math.min(x(at), WIDTH - 7 * text.length);
      if (from < free) continue;
      drawn.append(node("text", { class: "users", x: from, y: TOP - 7 }, text));
      free = from + 7 * text.length;
    }
    values.forEach((line, index) => drawn.append(node("path", { class: index ? "second" : "first", d: path(line, x, y) })));
    const key = node("span", { class: "key" }, ...lines.flatMap(([, name], index) => [node("b", index ? { class: "two" } : {}), name]));
    return node("figure", { style: "margin:0" }, node("h3", {}, `${title}, ${unit}`), key, drawn);
  }

  // A ramp counts as one change: a number of users counts only if it stays the same for another second.
  function levels() {
    let before = 0;
    return points.filter(({ users }, index) => {
      const settled = users > 0 && users !== before && users === (points[index + 1] || {}).users;
      if (settled) before = users;
      return settled;
    });
  }

  function path(line, x, y) {
    let made = "", pen = "M";
    line.forEach((value, index) => {
      if (value === null) { pen = "M"; return; }
      made += `${pen}${x(points[index].at).toFixed(1)} ${y(value).toFixed(1)}`;
      if (pen === "M" && (index + 1 === line.length || line[index + 1] === null)) made += "h.1";
      pen = "L";
    });
    return made;
  }

  function said(lines, values) {
    return lines.map(([, name], index) => {
      const newest = values[index].filter(value => value !== null).at(-1);
      return `${name} ${newest === undefined ? "none yet" : number(newest)}`;
    }).join(", ");
  }

  function niceStep(rough) {
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].find(each => each * power >= rough) * power;
  }

  // Each part has its own box, which is replaced only if it has changed. Otherwise a link could vanish during a click.
  function show(name, parts) {
    let box = document.getElementById(`loadgen-part-${name}`);
    if (!box) home.append(box = node("div", { id: `loadgen-part-${name}` }));
    const made = node("div", {}, ...parts);
    if (box.innerHTML !== made.innerHTML) box.replaceChildren(...made.childNodes);
  }

  function draw(live, shown) {
    const run = live.run;
    home.className = isDark() ? "dark" : "";
    place(run);
    show("facts", [facts(live)]);
    show("spans", run ? spans() : []);
    show("latency", run ? latencies(run, shown) : []);
    show("failures", run ? failures(run) : []);
    show("charts", run ? [node("h2", {}, "Second by second"), node("div", { class: "charts" }, ...CHARTS.filter(hasValues).map(chart)),
      node("p", { class: "note" },
        "Latencies are of the requests that ended in that second. While a response is unfinished, each read counts as one token.")] : []);
  }

  // The workload is in Locust's form under "Custom parameters", which is collapsed at first.
  function unfold() {
    const button = [...document.querySelectorAll("#root button[aria-expanded=false]")].find(each => each.textContent.includes("Custom parameters"));
    if (button && !unfold.done) { unfold.done = true; button.click(); }
  }

  // During a run, the section is between Locust's head and its tables. Locust replaces these elements at times.
  function place(run) {
    const header = run && document.querySelector("#root header");
    if (header && header.nextElementSibling !== home) header.after(home);
    if (!header && home.parentElement !== document.body) document.body.append(home);
  }

  // Locust writes the help of an option into its label, where it is cut off. It belongs below the input.
  function moveHelpBelowInputs() {
    for (const label of document.querySelectorAll(".MuiAccordionDetails-root label.MuiInputLabel-root")) {
      const [whole, name, help] = label.textContent.match(/^(.*?) \((.*)\)$/s) || [];
      const input = document.getElementById(label.htmlFor);
      if (!whole || !input) continue;
      label.firstChild.data = name;
      const legend = label.parentElement.querySelector("legend span");
      if (legend) legend.textContent = name;
      const text = node("p", { class: "loadgen-help", id: `${input.id}-help` }, help);
      input.setAttribute("aria-describedby", text.id);
      label.parentElement.append(text);
    }
  }

  // Add what Locust's page lacks for accessibility: names of buttons and dialogs, and tables that scroll by keyboard.
  function addAccessibility() {
    moveHelpBelowInputs();
    for (const button of document.querySelectorAll("#root button:not([aria-label]), .MuiModal-root button:not([aria-label])")) {
      if (button.textContent.trim()) continue;
      const place = button.closest("header") ? "Light or dark" : button.closest(".MuiModal-root") ? "Close" : "Choose columns";
      button.setAttribute("aria-label", place);
    }
    for (const table of document.querySelectorAll(".MuiTableContainer-root:not([tabindex])")) table.tabIndex = 0;
    for (const dialog of document.querySelectorAll(".MuiModal-root[role=presentation]:not(.MuiPopover-root)")) {
      dialog.setAttribute("role", "dialog");
      dialog.setAttribute("aria-label", (dialog.querySelector("h2") || {}).textContent || "Dialog");
    }
  }
  new MutationObserver(addAccessibility).observe(document.body, { childList: true, subtree: true });

  let next = 0;
  async function look() {
    clearTimeout(next);
    const shown = span;
    try {
      let live = await ask(seen);
      if (live.run && live.run.folder !== folder) {  // a new run: request all of its points
        const from = seen;
        folder = live.run.folder;
        [points, seen] = [[], 0];
        if (from) live = await ask(0);
      }
      if (live.run) {
        const added = live.run.points.filter(({ at }) => at >= seen);  // another request may have brought them already
        points = points.concat(added).slice(-live.run.point_limit);
        seen = points.length ? points.at(-1).at + 1 : 0;
      }
      if (shown !== span) return;  // the user has chosen another span, which is being requested
      draw(live, shown);
      unfold();
    } catch (error) {
      home.dataset.error = String(error);  // the process has ended: keep showing the last figures
    }
    clearTimeout(next);
    next = setTimeout(look, 1000);
  }

  async function ask(since) {
    const answer = await fetch(`./loadgen/live?since=${since}&span=${span}`);
    if (!answer.ok) throw new Error(`${answer.status}`);
    return answer.json();
  }

  look();
})();
