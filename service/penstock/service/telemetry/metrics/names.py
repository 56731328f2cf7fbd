"""Makes Prometheus' names of the names of instruments: dots become underscores, and the unit is appended."""

from __future__ import annotations

from penstock.runtime.measuring.instruments import Instrument, Kind

_UNITS = {"s": "seconds", "By": "bytes"}
_INFO = ".info"


def is_info(instrument: Instrument) -> bool:
    """Whether the instrument only carries labels, and its value is always 1."""
    return instrument.kind is Kind.GAUGE and instrument.name.endswith(_INFO)


def prometheus_unit(instrument: Instrument) -> str:
    """The unit as it stands at the end of the name. Empty for what is counted, which names itself."""
    if instrument.unit == "1":
        return "ratio" if instrument.kind is Kind.GAUGE else ""
    return _UNITS.get(instrument.unit, "")


def family_name(instrument: Instrument) -> str:
    """The name of the metric family: without the "_total" of a counter's samples, and the "_info" of an
    info's.
    """
    name = underscored(instrument.name.removesuffix(_INFO) if is_info(instrument) else instrument.name)
    unit = prometheus_unit(instrument)
    return name if not unit or name.endswith(f"_{unit}") else f"{name}_{unit}"


def prometheus_name(instrument: Instrument) -> str:
    """The name to ask Prometheus for. A histogram's series also end in "_bucket", "_sum" and "_count"."""
    name = family_name(instrument)
    if instrument.kind is Kind.COUNTER:
        return f"{name}_total"
    return f"{name}_info" if is_info(instrument) else name


def underscored(name: str) -> str:
    """The name of a label, or of an instrument without its unit, as Prometheus has it."""
    return name.replace(".", "_")
