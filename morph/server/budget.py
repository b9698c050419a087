"""The server's attention budget, which can change while it runs: `GET` and `PUT /morph/budget`."""

from __future__ import annotations

from dataclasses import replace

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from morph.engine.params import SamplingParams
from morph.server.body import read_json
from morph.server.fields import parse
from morph.server.interface import ServedEngine
from morph.server.schema import Strict


class Budget:
    """The budget of requests that name none; begins as the engine's default."""

    def __init__(self, engine: ServedEngine) -> None:
        self.value: float = engine.engine_config.attention_budget

    def apply(self, params: SamplingParams) -> SamplingParams:
        """`params` with this budget where the layout is chosen and no budget is named."""
        if params.layout != "auto" or params.attention_budget is not None:
            return params
        return replace(params, attention_budget=self.value)


class BudgetBody(Strict):
    """`PUT /morph/budget`."""

    attention_budget: float = Field(ge=0, le=1)


def install(app: FastAPI, budget: Budget, max_body_bytes: int) -> None:
    """Add the two routes."""

    @app.get("/morph/budget")
    async def read() -> JSONResponse:
        """The budget of now."""
        return JSONResponse({"attention_budget": budget.value})

    @app.put("/morph/budget")
    async def write(request: Request) -> JSONResponse:
        """Set it for the requests that come; those that run keep their layouts."""
        body = parse(BudgetBody, await read_json(request, max_body_bytes))
        budget.value = body.attention_budget
        return JSONResponse({"attention_budget": budget.value})
