"""The stand-in device ends its requests, and the table counts every call."""

from __future__ import annotations

from bench.probes.scheduler import main


def test_a_short_run(capsys, monkeypatch):
    argv = ["bench.probes.scheduler", "--waiting", "8", "--prefix", "64", "--chunk", "16", "--budget", "32"]
    monkeypatch.setattr("sys.argv", [*argv, "--rows", "4", "--step-ms", "0"])
    assert main() == 0
    out = capsys.readouterr().out
    assert "8 requests on a prefix of 64 tokens" in out
    counts = {line[:16].strip(): int(line[16:26]) for line in out.splitlines()[3:]}
    assert counts["submit"] == 8
    assert counts["schedule"] == counts["schedule, cpu"] > 4
    assert counts["load"] >= 8
