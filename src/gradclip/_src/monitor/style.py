"""The style of the page, light and dark."""

# The pictures' colours are variables, so they change in dark mode.
STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--muted:#5c6470;--grid:#e3e6eb;--norm:#2f6fb1;--clipped:#cf6a0a;
--skipped:#7a4fd0;--nonfinite:#c8202f;--threshold:#111418;--page:#f5f6f8;--card:#fff;--note:#fff4e0;--edge:#e8b765}
@media(prefers-color-scheme:dark){:root{--ink:#e8eaee;--muted:#a3abb8;--grid:#333a45;--norm:#6db1f2;--clipped:#f0993e;
--skipped:#b79bff;--nonfinite:#ff6b72;--threshold:#fff;--page:#14171c;--card:#1d2128;--note:#33280f;--edge:#8a6420}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.6rem;line-height:1.2;margin:0 0 8px}
h2{font-size:1.1rem;margin:0 0 8px}
.lead{margin:0 0 16px}
.note{background:var(--note);border-left:4px solid var(--edge);padding:10px 14px;margin:0 0 12px;border-radius:4px}
section{background:var(--card);border:1px solid var(--grid);border-radius:8px;padding:16px;margin:0 0 16px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(110px,1fr));gap:12px;margin:0 0 16px}
.tiles div{background:var(--card);border:1px solid var(--grid);border-radius:8px;padding:10px 14px}
.tiles .proposed{border:2px solid var(--norm);grid-column:span 2}
small{color:var(--muted);font-size:.85rem}
.facts{display:flex;flex-wrap:wrap;gap:2px 18px;margin:0 0 14px}
.facts div{display:flex;gap:6px;min-width:0}
.facts dd{font-size:.9rem;overflow-wrap:anywhere;min-width:0}
dt{color:var(--muted);font-size:.85rem}
dd{margin:0;font-size:1.35rem;font-variant-numeric:tabular-nums}
figure{margin:0}
figcaption{color:var(--muted);font-size:.9rem;margin-top:6px}
svg{display:block;width:100%;height:auto}
svg text{font-family:system-ui,sans-serif!important}
.narrow{display:none}
.proposal{margin:0 0 8px;font-weight:600}
code{font-family:ui-monospace,monospace}
li{overflow-wrap:anywhere}
ul{margin:0 0 12px;padding-left:20px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.95rem}
th,td{padding:5px 8px;border-bottom:1px solid var(--grid);text-align:right}
td.number{white-space:nowrap}
.words{text-align:left;overflow-wrap:anywhere;min-width:5em}
th{color:var(--muted);font-weight:500;vertical-align:bottom}
@media(max-width:640px){.tiles .proposed{grid-column:1/-1}th,td{padding:5px 4px;font-size:.85rem}}
@media(max-width:640px){main{padding:16px 10px 32px}section{padding:12px 10px}.wide{display:none}.narrow{display:block}}
"""
