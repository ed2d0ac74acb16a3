"""Holds JSON schemas that were written by hand, in the manner of schemas that people use.

The families are those of JSONSchemaBench; none of its schemas is here.

Families: arguments of functions (`calls`), answers of extraction (`extraction`), settings of tools (`settings`),
manifests of clusters (`manifests`), content of news (`news`), tracked events (`events`), and keywords one by one
(`keywords`).
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
DATE: Schema = {"type": "string", "format": "date"}
TIME: Schema = {"type": "string", "format": "date-time"}
EMAIL: Schema = {"type": "string", "format": "email"}
URI: Schema = {"type": "string", "format": "uri"}
UUID: Schema = {"type": "string", "format": "uuid"}


def one(*values: Any) -> Schema:
    return {"enum": list(values)}


def many(item: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": item, **limits}


def obj(optional: dict[str, Schema] | None = None, /, **required: Schema) -> Schema:
    """Return a closed object; `optional` properties may be left out."""
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def some(**properties: Schema) -> Schema:
    """Return an open object of which nothing is required."""
    return {"type": "object", "properties": properties}


def limited(low: float, high: float, kind: str = "integer") -> Schema:
    return {"type": kind, "minimum": low, "maximum": high}


def matching(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def sized(low: int, high: int) -> Schema:
    return {"type": "string", "minLength": low, "maxLength": high}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


ADDRESS = obj({"line2": TEXT}, street=TEXT, city=TEXT, postcode=matching("^[0-9]{5}$"), country=matching("^[A-Z]{2}$"))
MONEY = obj(amount=limited(0, 100000, "number"), currency=one("EUR", "USD", "GBP", "JPY"))
POINT = obj(lat=limited(-90, 90, "number"), lon=limited(-180, 180, "number"))
PERSON = obj({"email": EMAIL, "born": DATE}, name=sized(1, 40), age=limited(0, 130))

CALLS: list[Schema] = [
    obj({"unit": one("celsius", "fahrenheit")}, city=TEXT),
    obj({"days": limited(1, 14)}, location=POINT),
    obj(a=NUMBER, b=NUMBER, operation=one("add", "subtract", "multiply", "divide")),
    obj({"from_language": TEXT}, text=TEXT, to_language=matching("^[a-z]{2}$")),
    obj({"limit": limited(1, 50), "page": limited(1, 100)}, query=sized(1, 60)),
    obj({"cc": many(EMAIL, maxItems=3)}, to=EMAIL, subject=TEXT, body=TEXT),
    obj({"notes": TEXT}, title=TEXT, start=TIME, end=TIME),
    obj(amount=limited(0, 10**6, "number"), from_currency=matching("^[A-Z]{3}$"), to_currency=matching("^[A-Z]{3}$")),
    obj(path=matching("^/[a-z/]{1,20}$"), mode=one("read", "write", "append")),
    obj({"timeout_s": limited(1, 600)}, command=many(TEXT, minItems=1, maxItems=5)),
    obj(origin=matching("^[A-Z]{3}$"), destination=matching("^[A-Z]{3}$"), date=DATE, passengers=limited(1, 9)),
    obj({"colour": matching("^#[0-9a-f]{6}$")}, lamp=TEXT, is_on=FLAG),
    obj(principal=NUMBER, rate=limited(0, 1, "number"), years=limited(1, 40)),
    obj(numbers=many(NUMBER, minItems=1, maxItems=6)),
    obj({"tip_share": limited(0, 0.5, "number")}, bill=NUMBER, people=limited(1, 20)),
    obj(ticket=WHOLE, status=one("open", "waiting", "closed"), assignee=maybe(TEXT)),
    obj(items=many(obj(sku=matching("^[A-Z]{2}-[0-9]{4}$"), count=limited(1, 99)), minItems=1, maxItems=4)),
    obj(x=POINT, y=POINT),
    some(genre=one("jazz", "rock", "folk"), year=limited(1950, 2030)),
    obj(),
]
EXTRACTION: list[Schema] = [
    PERSON,
    obj(people=many(PERSON, maxItems=2)),
    obj(sentiment=one("positive", "neutral", "negative"), confidence=limited(0, 1, "number")),
    obj(labels=many(one("bug", "feature", "question", "chore"), minItems=1, maxItems=3)),
    obj(thoughts=many(TEXT, minItems=1, maxItems=3), answer=WHOLE),
    obj(invoice=matching("^INV-[0-9]{3,6}$"), total=MONEY, lines=many(obj(what=TEXT, price=NUMBER), maxItems=3)),
    obj(name=TEXT, address=ADDRESS),
    obj(yes=FLAG, why=sized(1, 80)),
    obj(entities=many(obj(text=TEXT, kind=one("person", "place", "thing"), start=WHOLE, end=WHOLE), maxItems=3)),
    obj(title=TEXT, ingredients=many(obj({"unit": one("g", "ml")}, name=TEXT, amount=NUMBER), minItems=1, maxItems=4)),
    obj(diagnosis=maybe(TEXT), severity=limited(1, 5), urgent=FLAG),
    obj(question=TEXT, choices=many(TEXT, minItems=4, maxItems=4), correct=limited(0, 3)),
    obj(score=limited(0, 10), strengths=many(TEXT, maxItems=2), weaknesses=many(TEXT, maxItems=2)),
    obj(company=TEXT, founded=limited(1800, 2030), ceo=maybe(obj(name=TEXT))),
    obj(date=DATE, time=matching("^([01][0-9]|2[0-3]):[0-5][0-9]$")),
    many(obj(term=TEXT, meaning=TEXT), minItems=1, maxItems=3),
    obj(rows=many(many(NUMBER, minItems=2, maxItems=2), minItems=1, maxItems=3)),
    obj(summary=sized(10, 120), keywords=many(sized(2, 12), maxItems=4)),
]
SETTINGS: list[Schema] = [
    some(indent=limited(0, 8), tabs=FLAG, quotes=one("single", "double"), width=limited(40, 200)),
    obj(
        {"description": TEXT, "private": FLAG},
        name=matching("^[a-z][a-z0-9-]{0,20}$"),
        version=matching("^[0-9]+\\.[0-9]+\\.[0-9]+$"),
    ),
    some(rules={"type": "object", "additionalProperties": one("off", "warn", "error")}),
    obj({"env": {"type": "object", "additionalProperties": TEXT}}, command=TEXT, args=many(TEXT, maxItems=4)),
    obj(version=one(1, 2), jobs={"type": "object", "additionalProperties": obj(run=TEXT), "maxProperties": 2}),
    some(include=many(TEXT, maxItems=2), exclude=many(TEXT, maxItems=2), strict=FLAG, target=one("es5", "es2020")),
    obj(hooks=many(obj({"args": many(TEXT, maxItems=2)}, id=TEXT), maxItems=2), repo=URI),
    {"anyOf": [TEXT, obj(path=TEXT), many(TEXT, maxItems=2)]},
    some(level=one("debug", "info", "warning", "error"), file=maybe(TEXT), rotate=some(size=WHOLE, keep=limited(0, 9))),
    obj(
        host={"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "hostname"}]},
        port=limited(1, 65535),
    ),
    {"type": "object", "patternProperties": {"^x-[a-z]+$": TEXT}, "additionalProperties": False, "maxProperties": 2},
    some(theme={"type": "object", "properties": {"dark": FLAG}, "additionalProperties": matching("^#[0-9a-f]{3}$")}),
    obj(schedule=matching("^[0-9*]{1,2} [0-9*]{1,2} \\* \\* \\*$"), enabled=FLAG),
    obj(
        dependencies={"type": "object", "additionalProperties": matching("^[~^]?[0-9]+\\.[0-9]+$"), "maxProperties": 3}
    ),
    some(a={"type": ["string", "null"]}, b={"type": ["integer", "boolean"]}),
    obj(
        retry=obj(attempts=limited(1, 10), backoff=one("fixed", "exponential")), on=many(one(500, 502, 503), maxItems=3)
    ),
]
_NAME = matching("^[a-z]([a-z0-9-]{0,14}[a-z0-9])?$")
_META = obj({"labels": {"type": "object", "additionalProperties": TEXT, "maxProperties": 2}}, name=_NAME)
_QUANTITY = matching("^[0-9]{1,4}(m|Ki|Mi|Gi)?$")
_LIMITS = some(cpu=_QUANTITY, memory=_QUANTITY)
_CONTAINER = obj(
    {
        "ports": many(obj(containerPort=limited(1, 65535)), maxItems=2),
        "resources": some(limits=_LIMITS, requests=_LIMITS),
    },
    name=_NAME,
    image=matching("^[a-z/]{1,20}:[a-z0-9.]{1,8}$"),
)
MANIFESTS: list[Schema] = [
    obj(
        apiVersion=one("v1"),
        kind=one("Pod"),
        metadata=_META,
        spec=obj(containers=many(_CONTAINER, minItems=1, maxItems=2)),
    ),
    obj(
        apiVersion=one("v1"),
        kind=one("ConfigMap"),
        metadata=_META,
        data={"type": "object", "additionalProperties": TEXT, "maxProperties": 2},
    ),
    obj(
        apiVersion=one("v1"),
        kind=one("Service"),
        metadata=_META,
        spec=obj(
            {"type": one("ClusterIP", "NodePort")},
            ports=many(obj({"protocol": one("TCP", "UDP")}, port=limited(1, 65535)), minItems=1, maxItems=2),
        ),
    ),
    obj(apiVersion=one("batch/v1"), kind=one("CronJob"), metadata=_META, spec=obj(schedule=TEXT, suspend=FLAG)),
    obj(
        apiVersion=one("apps/v1"),
        kind=one("Deployment"),
        metadata=_META,
        spec=obj(
            replicas=limited(0, 50),
            template=obj(metadata=_META, spec=obj(containers=many(_CONTAINER, minItems=1, maxItems=1))),
        ),
    ),
    obj(
        kind=one("Secret"),
        metadata=_META,
        data={"type": "object", "additionalProperties": matching("^[A-Za-z0-9+/]{4,16}$"), "maxProperties": 2},
    ),
    obj(
        kind=one("Role"),
        rules=many(
            obj(
                apiGroups=many(TEXT, maxItems=1),
                resources=many(one("pods", "services"), minItems=1, maxItems=2),
                verbs=many(one("get", "list", "watch"), minItems=1, maxItems=3),
            ),
            maxItems=2,
        ),
    ),
    obj(
        kind=one("Ingress"),
        spec=obj(
            rules=many(
                obj(host=TEXT, paths=many(obj(path=TEXT, pathType=one("Prefix", "Exact")), maxItems=2)), maxItems=2
            )
        ),
    ),
    obj(
        kind=one("Volume"),
        source={"anyOf": [obj(emptyDir=obj()), obj(hostPath=obj(path=TEXT)), obj(secret=obj(secretName=_NAME))]},
    ),
    _CONTAINER,
    _META,
    _LIMITS,
    obj(
        kind=one("Quota"),
        hard={"type": "object", "additionalProperties": _QUANTITY, "minProperties": 1, "maxProperties": 3},
    ),
]
_CREDIT = obj({"role": one("writer", "editor")}, by=TEXT)
_PART = {
    "anyOf": [
        obj(type=one("text"), content=TEXT),
        obj(type=one("image"), url=URI),
        obj(type=one("quote"), content=TEXT, by=TEXT),
    ]
}
NEWS: list[Schema] = [
    obj({"credits": many(_CREDIT, maxItems=2)}, id=UUID, headline=sized(1, 60), body=many(_PART, maxItems=3)),
    _PART,
    _CREDIT,
    obj(
        type=one("video"), seconds=limited(1, 7200), streams=many(obj(height=one(360, 720, 1080), url=URI), maxItems=2)
    ),
    obj(type=one("gallery"), images=many(obj({"caption": TEXT}, url=URI, width=WHOLE, height=WHOLE), maxItems=2)),
    obj(section=TEXT, parent=maybe(TEXT), order=NUMBER),
    obj(published=TIME, updated=maybe(TIME), embargo=maybe(DATE)),
    obj(tags=many(obj(slug=matching("^[a-z-]{1,16}$"), text=TEXT), maxItems=3), language=one("en", "fr", "de")),
    {
        "$defs": {"comment": obj({"replies": many({"$ref": "#/$defs/comment"}, maxItems=2)}, text=TEXT)},
        "$ref": "#/$defs/comment",
    },
    obj(score=obj(home=limited(0, 20), away=limited(0, 20)), minute=limited(0, 120), scorer=maybe(TEXT)),
]
EVENTS: list[Schema] = [
    obj(event=one("click"), x=limited(0, 4000), y=limited(0, 4000), target=maybe(sized(0, 20))),
    obj(event=one("page"), url=URI, referrer=maybe(URI), title=maybe(sized(0, 30))),
    obj(event=one("purchase"), order=UUID, total=NUMBER, items=limited(1, 100)),
    obj(event=one("login"), user=UUID, method=one("password", "sso", "passkey"), ok=FLAG),
    obj(event=one("error"), code=limited(400, 599), message=sized(0, 40), stack=maybe(TEXT)),
    obj(device=obj(os=one("ios", "android", "web"), version=matching("^[0-9]+(\\.[0-9]+)?$")), session=UUID),
    obj(ip={"type": "string", "format": "ipv4"}, at=TIME),
    obj(
        metric=TEXT,
        value=NUMBER,
        unit=one("ms", "s", "bytes", "count"),
        tags={"type": "object", "additionalProperties": TEXT, "maxProperties": 2},
    ),
    obj(latency=limited(0, 60000, "number"), bucket=limited(0, 9), sampled=FLAG),
    obj(experiment=TEXT, variant=one("a", "b", "control"), exposure=TIME),
    {"anyOf": [obj(kind=one("start"), at=TIME), obj(kind=one("stop"), at=TIME, reason=TEXT)]},
    obj(old=some(state=TEXT), new=some(state=TEXT), by=maybe(UUID)),
]
_TREE = {
    "$defs": {"node": obj({"left": {"$ref": "#/$defs/node"}, "right": {"$ref": "#/$defs/node"}}, value=WHOLE)},
    "$ref": "#/$defs/node",
}
KEYWORDS: list[Schema] = [
    {"const": {"a": [1, None, "x"]}},
    {"enum": [1, 2.5, "x", None, True, [], {}]},
    {"type": "null"},
    FLAG,
    WHOLE,
    NUMBER,
    TEXT,
    sized(3, 3),
    sized(0, 5),
    limited(-5, 5),
    limited(1000, 9999),
    {"type": "integer", "exclusiveMinimum": 0},
    {"type": "integer", "multipleOf": 5},
    {"type": "number", "exclusiveMaximum": 0},
    limited(0.25, 0.75, "number"),
    matching("^(red|green|blue)$"),
    matching("[0-9]{2}"),
    matching("^[^a-z]{1,4}$"),
    matching("^\\d{3}-\\d{4}$"),
    many(WHOLE, minItems=2, maxItems=4),
    many({"type": "boolean"}, minItems=3, maxItems=3),
    {"type": "array", "prefixItems": [TEXT, WHOLE], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [FLAG], "items": NUMBER, "maxItems": 3},
    {"type": "object", "additionalProperties": WHOLE, "maxProperties": 2},
    {"type": "object", "additionalProperties": WHOLE, "minProperties": 1, "maxProperties": 3},
    {"type": "object", "properties": {"a": WHOLE}, "required": ["a", "b"], "maxProperties": 3},
    {"allOf": [limited(0, 10), {"type": "integer", "minimum": 5}]},
    {"allOf": [some(a=WHOLE), {"required": ["a"]}], "maxProperties": 2},
    {"anyOf": [WHOLE, TEXT, {"type": "null"}]},
    {"oneOf": [WHOLE, TEXT]},
    {"type": ["integer", "null"]},
    _TREE,
    {"oneOf": [obj(kind=one("a"), a=WHOLE), obj(kind=one("b"), b=TEXT)]},
    DATE,
    TIME,
    EMAIL,
    URI,
    UUID,
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "hostname"},
    {"type": "string", "format": "duration"},
    {
        "type": "object",
        "properties": {'naïve "key"\n': TEXT},
        "required": ['naïve "key"\n'],
        "additionalProperties": False,
    },
]

BY_HAND: dict[str, list[Schema]] = {
    "calls": CALLS,
    "extraction": EXTRACTION,
    "settings": SETTINGS,
    "manifests": MANIFESTS,
    "news": NEWS,
    "events": EVENTS,
    "keywords": KEYWORDS,
}
