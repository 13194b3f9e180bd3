"""The admin surface: switches, live settings, the audit trail, plans. The answers' shapes are promised in docs/api.md."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from aiohttp import web

from .. import live_settings
from ..errors import FieldError
from ..front.audit import KEPT
from ..front.service import Service
from ..host import KERNEL_SLOTS, PluginHost
from ..params import MAX_NAME_CHARS, check_switches
from ..plugin import PluginInfo, Slot
from .app import Call, Endpoint, Routes, json_response
from .experiments import add_experiment_routes
from .wire import FeaturesBody, SettingsBody, convert, decode_object

CORE_DEFAULTS: dict[str, str] = {
    "attention": "core (torch)",
    "scheduling": "core (first come, first served)",
    "quantization": "core (the checkpoint's own weights)",
    "tool_calls": "none",
}
"""What holds a slot that no plugin holds, with a model on the CPU."""
ON_A_GPU = {"attention": "core (triton, or torch where that can't serve the model)"}
MOST_DIGITS = 18
"""Of a number in a query: Python refuses to read numbers of thousands of digits."""
FEW = 16
"""Plans and audit entries when no number is asked for."""


def add_routes(routes: Routes) -> None:
    routes.add("GET", "/v1/tokenbus/features", Endpoint(features, "admin"))
    routes.add("POST", "/v1/tokenbus/features", Endpoint(set_features, "admin"))
    routes.add("GET", "/v1/tokenbus/settings", Endpoint(settings, "admin"))
    routes.add("POST", "/v1/tokenbus/settings", Endpoint(set_settings, "admin"))
    routes.add("GET", "/v1/tokenbus/audit", Endpoint(audit, "admin"))
    routes.add("GET", "/v1/tokenbus/plans", Endpoint(plans, "admin"))
    add_experiment_routes(routes)


def feature_state(service: Service) -> dict[str, Any]:
    """Every plugin: on, off, or off because of something, after all rewrites; and who holds each slot."""
    client, host, info = service.client, service.host, service.client.info
    on = client.switches.on
    holders = {slot: host.holder(slot, on) for slot in get_args(Slot)}
    core = core_defaults(host.device)
    slots = {slot: holder or core[slot] for slot, holder in holders.items()}
    lossless: dict[str, Any] = {"lossless": True if info is None else info.lossless}
    if info is not None and not info.lossless:
        lossless["because"] = info.lossless_reason
    return {
        "features": {name: _feature(service, name, slots) for name in sorted(host.catalogue)},
        "slots": slots,
        "kernels": lossless,
        "client_features": list(service.config.server.client_features),
        "broken": {name: error.message for name, error in sorted(host.broken.items())},
    }


def core_defaults(device: str) -> dict[str, str]:
    """What holds a slot that no plugin holds, with the model on this kind of device."""
    return CORE_DEFAULTS if device == "cpu" else CORE_DEFAULTS | ON_A_GPU


def _feature(service: Service, name: str, slots: dict[str, str]) -> dict[str, Any]:
    client, plugin = service.client, service.host.info(name)
    switches = client.switches
    entry: dict[str, Any] = {
        "on": name in switches.on,
        "scope": plugin.scope,
        "lossless": service.host.lossless(name),
        "applies": _applies(service.host, plugin),
        "claims": sorted(plugin.claims),
        "client": name in service.config.server.client_features,
    }
    if not entry["on"]:
        entry["because"] = switches.reasons.get(name, "not on by default")
        if name in service.host.loaded:
            entry["lingers"] = True
    if plugin.slot is not None:
        entry["slot"] = plugin.slot
        if not entry["on"] and slots[plugin.slot] == core_defaults(service.host.device)[plugin.slot]:
            entry["because"] += f"; its slot is held by {slots[plugin.slot]}"
    for key, names in (("requires", plugin.requires), ("conflicts", plugin.conflicts)):
        if names:
            entry[key] = sorted(names)
    if name in client.refusing:
        entry["failed"] = client.refusing[name].message
    elif name in switches.failed:
        entry["failed"] = switches.reasons.get(name, "")
    return entry


def _applies(host: PluginHost, plugin: PluginInfo) -> str:
    """When a switch of it takes effect: live; drain: only while no request is open; restart: at the server's start."""
    if plugin.scope == "engine":
        return "restart"
    return "drain" if plugin.slot in KERNEL_SLOTS and not host.lossless(plugin.name) else "live"


async def features(call: Call) -> web.Response:
    return json_response(feature_state(call.service))


async def set_features(call: Call) -> web.Response:
    body = convert(decode_object(await call.body()), FeaturesBody)
    check_switches(body.features, "features")
    await call.service.client.set_features(body.features, call.who)
    return json_response(feature_state(call.service))


def setting_state(service: Service) -> dict[str, Any]:
    shown = live_settings.all_settings(service.client.settings.config, service.host)
    return {"settings": msgspec.to_builtins(shown)}


async def settings(call: Call) -> web.Response:
    return json_response(setting_state(call.service))


async def set_settings(call: Call) -> web.Response:
    body = convert(decode_object(await call.body()), SettingsBody)
    if (name := next((name for name in body.settings if len(name) > MAX_NAME_CHARS), None)) is not None:
        raise FieldError(f"settings.{name}", "no setting is called so")
    await call.service.client.set_settings(body.settings, call.who)
    return json_response(setting_state(call.service))


async def audit(call: Call) -> web.Response:
    return json_response({"entries": call.service.audit.last(_last(call, KEPT))})


async def plans(call: Call) -> web.Response:
    last = _last(call, call.service.config.scheduler.plan_history)
    reply = msgspec.to_builtins(await call.service.client.query("plans", last=last))
    return json_response({"plans": reply["plans"] if isinstance(reply, dict) else reply})


def _last(call: Call, most: int) -> int:
    """How many entries the query asks for."""
    text = call.request.query.get("last", str(min(FEW, most)))
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS and 1 <= int(text) <= most):
        raise FieldError("last", f"must be between 1 and {most}")
    return int(text)
