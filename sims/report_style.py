"""The look of reports: one style sheet for light and dark, wide screens and phones."""

STYLE_SHEET = """
:root { color-scheme: light dark;
  --page: #f6f6f3; --card: #ffffff; --ink: #1c1c1a; --muted: #63625c; --grid: #e4e3de;
  --good: #1a7f4b; --bad: #c8323a;
  --series-1: #2a6fd0; --series-2: #e0662f; --series-3: #129a70; --series-4: #b98200;
  --series-5: #c94a86; --series-6: #6551c4; --series-7: #5c8a00; --series-8: #0e8fa8;
  --state-joining: #c4b3e8; --state-training: #86a9d4; --state-round: #234a75;
  --state-waiting: #e6cd87; --state-finished: #a5cbb2;
  --work-train: #86a9d4; --work-apply: #129a70; --work-evaluate: #5c8a00; --work-download: #9c86d8;
  --work-send: #e0662f; --work-collect: #f0d9a0; --work-average: #234a75; --work-vote: #c94a86;
  --use-train: #86a9d4; --use-apply: #129a70; --use-join: #c4b3e8; --use-round: #234a75; --use-wait: #e6cd87;
  --use-pause: #b9b7ae;
  --done-pause: #8f8d84; --done-partition: #c8323a; --done-slow: #d99100; --done-delay: #6551c4;
  --done-drop: #0e8fa8; --done-duplicate: #c94a86; --done-apart: #b4551f; }
@media (prefers-color-scheme: dark) { :root {
  --page: #151514; --card: #1f1f1d; --ink: #eeeeea; --muted: #a9a8a1; --grid: #383733;
  --good: #4cc38a; --bad: #f2777c;
  --series-1: #5b9bf3; --series-2: #f08a55; --series-3: #35b98d; --series-4: #d6a11f;
  --series-5: #e57aac; --series-6: #9c8cf0; --series-7: #93b93a; --series-8: #3cb4cd;
  --state-joining: #7d6bb0; --state-training: #4a72a5; --state-round: #c7dcf5;
  --state-waiting: #8d773a; --state-finished: #4f7d63;
  --work-train: #4a72a5; --work-apply: #35b98d; --work-evaluate: #93b93a; --work-download: #7d6bb0;
  --work-send: #f08a55; --work-collect: #6f6038; --work-average: #c7dcf5; --work-vote: #e57aac;
  --use-train: #4a72a5; --use-apply: #35b98d; --use-join: #7d6bb0; --use-round: #c7dcf5; --use-wait: #8d773a;
  --use-pause: #66645d;
  --done-pause: #8b897f; --done-partition: #f2777c; --done-slow: #e0a83a; --done-delay: #9c8cf0;
  --done-drop: #3cb4cd; --done-duplicate: #e57aac; --done-apart: #f08a55; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; } h2 { font-size: 18px; margin: 0 0 2px; }
h3 { font-size: 14px; margin: 0 0 6px; }
p { margin: 0 0 12px; } .note { color: var(--muted); max-width: 78ch; }
section, .verdict, .run { background: var(--card); border: 1px solid var(--grid); border-radius: 10px;
  padding: 18px 20px; margin-top: 18px; }
.run section { border: 0; padding: 12px 0 0; } .run > summary { color: var(--ink); font-weight: 600; font-size: 17px; }
.verdict { border-left: 5px solid var(--good); } .verdict.broken { border-left-color: var(--bad); }
.verdict p:last-child, .verdict ul { margin-bottom: 0; } .verdict strong { color: var(--good); }
.verdict.broken strong { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(215px, 1fr)); gap: 12px; margin-top: 18px; }
.tile { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; padding: 12px 16px; }
.tile b { display: block; font-size: 22px; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: 13px; display: block; line-height: 1.4; }
.good b { color: var(--good); } .bad b { color: var(--bad); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 18px; }
figure { margin: 0; }
svg { width: 100%; height: auto; display: block; }
svg text { font-family: inherit !important; }
.scroll { overflow-x: auto; } .wide svg { min-width: 700px; }
.legend { list-style: none; margin: 8px 0 0; padding: 0; display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: 13px; }
.dot { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.line { display: inline-block; width: 20px; height: 0; border-top: 3px solid; vertical-align: 4px; margin-right: 6px; }
.bar { display: flex; height: 18px; border-radius: 4px; overflow: hidden; min-width: 180px; background: var(--grid); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th { text-align: left; color: var(--muted); font-weight: 500; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
tr:last-child td { border-bottom: 0; } .number { text-align: right; }
pre { white-space: pre-wrap; margin: 8px 0 0; padding: 12px 14px; border-radius: 8px; background: var(--page);
  font-size: 13px; overflow-x: auto; }
table.narrow { width: auto; }
summary { cursor: pointer; color: var(--muted); } details table { margin-top: 8px; } details { margin-top: 10px; }
@media (max-width: 520px) { main { padding: 16px 10px 40px; } section, .verdict, .run { padding: 14px 12px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 8px; } .tile { padding: 10px 11px; } .tile b { font-size: 19px; }
  h1 { font-size: 22px; } }
"""
