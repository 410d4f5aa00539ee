// Draws the snapshots of a run. A live page receives them as server-sent events; a saved page contains them.
(() => {
  "use strict";
  const saved = JSON.parse(document.getElementById("data").textContent);
  const seconds = value => value >= 1 ? [value, "s"] : value >= 1e-3 ? [value * 1e3, "ms"] : [value * 1e6, "µs"];
  const digits = value => value.toLocaleString("en", { maximumSignificantDigits: 3 });
  const whole = value => Math.round(value).toLocaleString("en");
  const duration = value => value === null ? "–" : value === 0 ? "0" : (([number, unit]) => `${digits(number)} ${unit}`)(seconds(value));
  const percent = value => `${digits(value * 100)}%`;
  const incomplete = snapshot => snapshot.truncated + snapshot.failed + snapshot.rejected + snapshot.dropped;
  const ended = snapshot => snapshot.complete + incomplete(snapshot);
  const over = snapshot => snapshot.phase === "ended" || snapshot.phase === "compressing";
  const inFlight = snapshot => Math.max(0, snapshot.sent + snapshot.dropped - ended(snapshot));
  const CHARTS = [
    { title: "Requests in flight", text: whole, minimum: 4, lines: [["in flight", inFlight, "first"], ["running on the server", s => s.server_running, "third"], ["waiting on the server", s => s.server_waiting, "second"]] },
    { title: "Output tokens per second", text: whole, lines: [["last seconds", s => over(s) ? null : s.tokens_per_s, "first"]] },
    { title: "Time to first token, so far", text: duration, lines: [["p50", s => s.ttft_p50_s, "first"], ["p99", s => s.ttft_p99_s, "second"]] },
    { title: "Time to first answer, so far", text: duration, lines: [["p50", s => s.ttfa_p50_s, "first"], ["p99", s => s.ttfa_p99_s, "second"]] },
    { title: "Time per output token, so far", text: duration, lines: [["p50", s => s.tpot_p50_s, "first"], ["p99", s => s.tpot_p99_s, "second"]] },
    { title: "KV cache used on the server", text: percent, lines: [["KV cache", s => s.kv_used, "first"]] },
    { title: "Incomplete requests", text: whole, minimum: 4, lines: [["incomplete", incomplete, "bad-line"]] },
  ];
  let title = saved.title, snapshots = saved.snapshots, connected = !saved.live, note = saved.note;

  // Text is inserted as text nodes, so that text from a server is never markup.
  function node(tag, attributes, ...children) {
    const made = ["svg", "path", "line", "text"].includes(tag)
      ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function tiles(last) {
    const rows = [
      ["In flight", whole(inFlight(last)), `${whole(last.streaming)} streaming`],
      ["Ended", last.planned === null ? whole(ended(last)) : `${whole(ended(last))} of ${whole(last.planned)}`, `${whole(last.complete)} complete`],
      ["Output throughput", `${whole(last.tokens_per_s)} tokens/s`, over(last) ? "mean of the run" : "last seconds"],
      ["TTFT p50", duration(last.ttft_p50_s), `p99 ${duration(last.ttft_p99_s)}`],
      ["TPOT p50", duration(last.tpot_p50_s), `p99 ${duration(last.tpot_p99_s)}`],
    ];
    if (last.ttfa_p50_s !== null) rows.splice(3, 0, ["TTFA p50", duration(last.ttfa_p50_s), `p99 ${duration(last.ttfa_p99_s)}`]);
    if (last.server_waiting !== null) rows.push(["Waiting", whole(last.server_waiting), last.server_running === null ? "on the server" : `on the server, ${whole(last.server_running)} running`]);
    if (last.kv_used !== null) rows.push(["KV cache", percent(last.kv_used), ""]);
    const states = ["failed", "truncated", "rejected", "dropped"].filter(state => last[state]).map(state => `${whole(last[state])} ${state}`);
    rows.push(["Incomplete", whole(incomplete(last)), states.join(", "), incomplete(last) > 0]);
    if (last.unwritten_bytes) rows.push(["Records", `${digits(last.unwritten_bytes / 1e6)} MB`, "wait in memory: is the disk full?", true]);
    return rows.map(([name, value, small, bad]) => node("div", {}, node("dt", {}, name),
      node("dd", bad ? { class: "bad" } : {}, ...withUnit(value), node("span", { class: "note" }, small))));
  }

  // A small unit leaves room for the number.
  function withUnit(value) {
    const [number, ...unit] = value.split(" ");
    return unit.length && !value.includes(" of ") ? [number, node("span", { class: "unit" }, ` ${unit.join(" ")}`)] : [value];
  }

  function chart({ title, text, lines, minimum = 0 }) {
    const width = Math.round(Math.min(520, document.getElementById("charts").clientWidth)), height = 176, left = 58, bottom = 20, top = 8, right = 8;
    const drawn = lines.map(([name, value, style]) => ({ name, style, points: snapshots.map(s => [s.elapsed_s, value(s)]).filter(point => point[1] !== null) }))
      .filter(line => line.points.length);
    if (!drawn.length) return null;
    const first = snapshots[0].elapsed_s, last = Math.max(snapshots[snapshots.length - 1].elapsed_s, first + 1);
    const largest = drawn.reduce((most, line) => line.points.reduce((value, point) => Math.max(value, point[1]), most), minimum) || 1;
    const step = niceStep(largest / 3), maximum = step * Math.ceil(largest / step);
    const x = time => left + (time - first) / (last - first) * (width - left - right);
    const y = value => height - bottom - value / maximum * (height - bottom - top);
    const latest = drawn.map(line => `${line.name} ${text(line.points[line.points.length - 1][1])}`).join(", ");
    const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}. Latest: ${latest}.` });
    for (let level = 0; level <= maximum + step / 2; level += step) {
      svg.append(node("line", { x1: left, x2: width - right, y1: y(level), y2: y(level) }),
        node("text", { x: left - 6, y: y(level) + 4, "text-anchor": "end" }, text(level)));
    }
    const timeStep = niceStep((last - first) / 4);
    for (let time = Math.ceil(first / timeStep) * timeStep; time <= last; time += timeStep) {
      svg.append(node("text", { x: x(time), y: height - 4, "text-anchor": time > last - timeStep / 3 ? "end" : "middle" }, `${digits(time)} s`));
    }
    for (const line of drawn) {
      svg.append(node("path", { class: line.style, d: line.points.map(([time, value], index) => `${index ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`).join("") }));
    }
    const keys = drawn.map(line => node("span", { class: `key ${line.style}` }, line.name));
    return node("figure", {}, node("figcaption", {}, node("h2", {}, title), ...(drawn.length > 1 ? keys : [])), svg);
  }

  // 1, 2 or 5 times a power of ten.
  function niceStep(rough) {
    const power = 10 ** Math.floor(Math.log10(rough));
    return power * [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999);
  }

  function draw() {
    document.getElementById("title").textContent = title || "Load test";
    const last = snapshots[snapshots.length - 1];
    const phase = last ? last.phase : "connecting";
    document.title = `${phase} · ${title || "loadgen"}`;
    document.getElementById("state").textContent = connected || phase === "ended" ? phase : "not connected";
    document.getElementById("foot").textContent = note;
    if (!last) return;
    const byTime = last.duration_s !== null;
    document.getElementById("bar").firstElementChild.style.width = `${(over(last) ? 1 : last.done || 0) * 100}%`;
    const left = byTime && !over(last) ? `, ${Math.max(0, Math.ceil(last.duration_s - last.running_s))} s left` : "";
    document.getElementById("progress").textContent = `${last.elapsed_s.toFixed(1)} s${left}`;
    document.getElementById("tiles").replaceChildren(...tiles(last));
    document.getElementById("charts").replaceChildren(...CHARTS.map(chart).filter(Boolean));
  }

  draw();
  if (saved.live) {
    const events = new EventSource("events");
    const on = (name, handle) => events.addEventListener(name, event => { connected = true; handle(JSON.parse(event.data)); draw(); });
    on("run", run => { title = run.title; snapshots = run.snapshots; });
    on("snapshot", snapshot => { snapshots.push(snapshot); if (snapshots.length > 4800) snapshots = snapshots.filter((_, index) => index % 2 === 0); });
    on("end", end => { note = end.note; events.close(); });
    events.onerror = () => { connected = false; draw(); };
  }
})();
