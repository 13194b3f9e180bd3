"""GET and POST /v1/tokenbus/experiments: how experiments stand, and what an operator does with them."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ..errors import FieldError, NotFoundError
from ..experiments.controller import Experiments
from ..front.service import Service
from .app import Call, Endpoint, Routes, json_response
from .wire import ExperimentBody, convert, decode_object


def add_experiment_routes(routes: Routes) -> None:
    routes.add("GET", "/v1/tokenbus/experiments", Endpoint(show, "admin"))
    routes.add("POST", "/v1/tokenbus/experiments", Endpoint(change, "admin"))


def experiment_state(service: Service) -> dict[str, Any]:
    return {"experiments": {} if service.experiments is None else service.experiments.view()}


async def show(call: Call) -> web.Response:
    return json_response(experiment_state(call.service))


async def change(call: Call) -> web.Response:
    body = convert(decode_object(await call.body()), ExperimentBody)
    if call.service.experiments is None:
        raise NotFoundError("there are no experiments here: they are set up in tokenbus.toml, as [experiments.NAME]")
    await _do(call.service.experiments, body, call.who)
    return json_response(experiment_state(call.service))


async def _do(experiments: Experiments, body: ExperimentBody, who: str) -> None:
    if body.traffic is not None and body.action not in {"start", "ramp"}:
        raise FieldError("traffic", "only makes sense with start and ramp")
    match body.action:
        case "start":
            await experiments.start(body.name, who, body.traffic)
        case "ramp":
            if body.traffic is None:
                raise FieldError("traffic", "is missing: the share of traffic that is to take part, 0 to 1")
            await experiments.ramp(body.name, who, body.traffic)
        case "stop":
            await experiments.stop(body.name, who)
        case "rollback":
            await experiments.rollback(body.name, who)
