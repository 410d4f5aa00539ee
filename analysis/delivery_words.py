"""Whether the load that was named is the load that was sent, in words: one wording for the terminal and the page."""

from __future__ import annotations

from analysis.words import Summary, count, duration, of_sessions, significant

UNLIKELY = 0.001
"""A p-value below which a load is said to be another than the one named: one such run in a thousand is chance."""


def delivery(summary: Summary) -> str:
    """Whether the load that was named is the load that was sent; nothing when nothing was asked."""
    sent = summary["delivery"]
    if not sent["asked"]:
        return ""
    noun, gone = ("session", "begun") if of_sessions(summary) else ("request", "sent")
    parts = [f"{sent['sent']:,} of {count(sent['asked'], noun)} {gone}"]
    rate, variation, check = sent["rate_per_s"], sent["cv"], sent["ks"]["sent"]
    if rate["named"] is not None and rate["sent"] is not None:
        parts.append(f"{significant(rate['sent'], 4)} per second ({significant(rate['named'], 4)} named)")
    if variation["named"] and variation["sent"] is not None:
        parts.append(f"gaps of variation {significant(variation['sent'])} ({significant(variation['named'])} named)")
    if check is not None:
        fit = "fitting the name" if check["p_value"] >= UNLIKELY else "not of the name"
        parts.append(f"{fit} (Kolmogorov-Smirnov p = {significant(check['p_value'], 2)})")
    elif sent["ks"]["due"] is not None:
        parts.append("too late for a check of their distribution")
    if sent["late_s"] is not None:
        parts.append(f"99 % at most {duration(sent['late_s']['p99'])} late")
    return f"{', '.join(parts)}."


def delivered(summary: Summary) -> bool:
    """Whether everything went out, and nothing speaks against its having been as named."""
    sent = summary["delivery"]
    checks = (check for check in sent["ks"].values() if check is not None)
    return not sent["not_sent"] and all(check["p_value"] >= UNLIKELY for check in checks)
