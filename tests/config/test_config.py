"""Configurations: what is read, what is refused, and that nothing else ever happens."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cflat import ConfigError
from cflat.config.choices import optimizer_config
from cflat.config.documents import load_yaml, merge, parse_overrides, read_document
from cflat.config.presets import PRESETS, resolve_config
from cflat.config.run_config import SECTIONS, RunConfig, parse_config
from cflat.config.validation import parse_section
from cflat.methods import get_method_spec, list_methods
from cflat.optim import list_optimizers

START = ["method=icarl", "data=digits", "optimizer=c_flat_turbo"]


def resolve(*overrides: str) -> RunConfig:
    return resolve_config(parse_overrides([*START, *overrides]))


def test_values_arrive_with_their_types() -> None:
    config = resolve(
        "optimizer.rho=1e-2",
        "optimizer.reading=calibrated",
        "base.milestones=[3, 4]",
        "base.schedule=multistep",
        "runtime.precision=32",
        "method.temperature=3",
        "stream.order_seed=null",
        "seed=7",
    )
    assert config.optimizer.settings.rho == 0.01
    assert config.optimizer.settings.reading == "calibrated"
    assert config.base.milestones == (3, 4)
    assert config.runtime.precision == "32"
    assert config.method.settings.temperature == 3.0
    assert config.stream.order_seed is None
    assert config.seed == 7


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.roh=1", r"Unknown key 'optimizer.roh'\. Did you mean 'rho'\?"),
        ("optimiser.rho=1", r"Unknown key 'optimiser'\. Did you mean 'optimizer'\?"),
        ("optimizer.reading.foo=1", r"optimizer.reading must be"),
        ("optimizer.reading=printd", r"optimizer.reading must be .*'printed'"),
        ("optimizer.rho=0", r"optimizer.rho must be above 0, got 0"),
        ("optimizer.rho=.nan", r"optimizer.rho must be"),
        ("optimizer=c_flatt", r"Unknown optimizer 'c_flatt'\. Did you mean 'c_flat'"),
        ("method.temp=1", r"Did you mean 'temperature'"),
        ("method.temperature=0", r"method.temperature must be above 0, got 0"),
        ("method=icarll", r"Unknown method 'icarll'\. Did you mean 'icarl'"),
        ("data=digit", r"Unknown dataset 'digit'\. Did you mean 'digits'"),
        ("preset=smok", r"Unknown preset 'smok'\. Did you mean 'smoke'"),
        ("preset=paper", r"preset 'paper' is made for photographs"),
        ("train.epochs=true", r"train.epochs must be a number, got True"),
        ("train.epochs=1.5", r"train.epochs must be a whole number"),
        ("train.epochs=-1", r"train.epochs must be at least 0"),
        ("train.batch_size=0", r"train.batch_size must be at least 1"),
        ("train.batch_size=1" + "0" * 400, r"train.batch_size must be at most"),
        ("optimizer={name: looksam, k: 1" + "0" * 400 + "}", r"optimizer.k must be at most 1.8e308 in magnitude"),
        ("train.check_purity=3", r"train.check_purity must be true or false, got 3"),
        ("train=5", r"train must hold keys and values, got 5"),
        ("base.lr=fast", r"base.lr must be a number.*got 'fast'"),
        ("base.lr=.inf", r"base.lr must be a finite number, got inf"),
        ("base.schedule=multistep", r"needs base.milestones"),
        ("base={nesterov: true, momentum: 0}", r"base.name=sgd rejects its keywords: Nesterov momentum requires"),
        ("base={nesterov: true, name: adam}", r"Unknown key 'base.nesterov'.*of adam: betas, eps"),
        ("base.momentum=1", r"base.momentum must be below 1, got 1"),
        ("base={name: rmsprop, alhpa: 0.9}", r"Unknown key 'base.alhpa'. Did you mean 'alpha'\?"),
        ("base={name: rmsprop, alpha: x}", r"base.alpha must be a number, got 'x'"),
        ("base={name: rmsprop, alpha: -1}", r"base.name=rmsprop rejects its keywords: Invalid alpha value: -1.0"),
        ("base={name: qhm, nu: 2}", r"base.nu must be at most 1, got 2"),
        ("base={name: adamw, betas: [0.9]}", r"base.betas must have more values, got \[0.9\]"),
        ("base={name: rprop, weight_decay: 0.1}", r"'rprop' has no weight decay"),
        ("base=lbfgs", r"lbfgs cannot be a base optimizer: it evaluates the loss itself"),
        ("base=muon", r"muon cannot be a base optimizer: it updates matrices alone"),
        ("base=sdg", r"Unknown base optimizer 'sdg'. Did you mean 'sgd'"),
        ("base.name=5", r"base.name: Unknown base optimizer '5'"),
        ("base.name=null", r"base.name must be text, got None"),
        ("base.milestones=[0]", r"base.milestones must be at least 1"),
        ("base.milestones=[4, 2]", r"base.milestones must ascend"),
        ("method={name: icarl, memory_total: 20, memory_per_class: 2}", r"exclude each other"),
        ("method.memory_total=5", r"method.memory_total must be at least 10"),
        ("stream.scenario=domain", r"'digits' has none"),
        ("stream.labels=growing", r"are for domain streams"),
        ("stream.initial=11", r"stream.initial must be at most 10"),
        ("backbone=resnet19", r"Unknown backbone 'resnet19'\. Did you mean 'resnet"),
        ("backbone={name: vit_tiny, weights: random, image_size: 100}", r"must be a multiple of 16, got 100"),
        ("backbone=vit_tiny", r"backbone.weights must be given"),
        ("backbone.inputs=pilott", r"Unknown kind of inputs 'pilott'\. Did you mean 'pilot'"),
        ("backbone.normalize=maybe", r"backbone.normalize must be timm or pilot"),
        ("runtime.accelerator=gpu", r"runtime.accelerator must be one of"),
        ("runtime.accelerator=mps", r"'mps' cannot be used: .* use cpu"),
        ("runtime={accelerator: cpu, precision: 16}", r"precision 16 needs a GPU"),
        ("runtime.devices=0", r"runtime.devices must be"),
        ("seed=-1", r"seed must be"),
        ("seed=x", r"seed must be a whole number.*got 'x'"),
        ("3=4", r"Unknown key '3'"),
        ("epochs", r"Expected key=value"),
        ("a..b=1", r"Expected key=value"),
        ("seed=[1", r"is not valid YAML"),
    ],
)
def test_mistakes_get_one_clear_message(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(override)


def test_a_method_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(ConfigError, match="'memo' runs on class, task streams"):
        resolve_config(parse_overrides(["method=memo", "data=domains:/x", "stream.scenario=domain", "preset=smoke"]))


def test_a_run_must_say_what_and_on_what() -> None:
    with pytest.raises(ConfigError, match=r"method.name must be given, for example --method"):
        resolve_config({"data": "digits"})
    with pytest.raises(ConfigError, match=r"data.name must be given, for example --data"):
        resolve_config({"method": "icarl"})


def test_another_choice_drops_the_settings_of_the_first() -> None:
    layer = merge({"method": {"name": "icarl", "temperature": 3}}, {"method": {"name": "finetune"}})
    assert layer == {"method": {"name": "finetune"}}
    same = merge({"optimizer": {"name": "c_flat", "rho": 1}}, {"optimizer": {"name": "c-flat", "lam": 0}})
    assert same["optimizer"] == {"name": "c-flat", "rho": 1, "lam": 0}
    base = merge({"base": {"name": "sgd", "lr": 0.5, "nesterov": True}}, {"base": "adam"})
    assert base["base"] == {"name": "adam", "lr": 0.5}


def test_keywords_of_a_base_optimizer_stand_beside_the_keys_of_all() -> None:
    config = resolve("base.name=RMSprop", "base.alpha=0.5")
    assert config.base.keywords == {"alpha": 0.5, "eps": 1e-8, "momentum": 0, "centered": False}
    values = config.to_dict()
    assert (values["base"]["name"], values["base"]["alpha"], "keywords" in values["base"]) == ("rmsprop", 0.5, False)
    assert parse_config(values).to_yaml() == config.to_yaml()
    assert resolve("base.nesterov=on").base.keywords == {"momentum": 0.9, "dampening": 0, "nesterov": True}


def test_normalize_names_an_input_recipe() -> None:
    assert resolve("backbone.normalize=timm").backbone.inputs == "timm"
    assert resolve("backbone.normalize=false").backbone.inputs == "pilot"


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "+1e-3", "1.0e-3", ".1e-2", "0.001"])
def test_numbers_are_numbers(text: str) -> None:
    assert load_yaml(text) == 0.001


@pytest.mark.parametrize(
    ("name", "text"), [("c.yaml", "seed: 3\nmethod: icarl\n"), ("c.json", '{"seed": 3, "method": "icarl"}')]
)
def test_yaml_and_json_files_are_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_document(tmp_path / name) == {"seed": 3, "method": "icarl"}


@pytest.mark.parametrize("text", ["- 1", "a: [", "a: b: c", "\x00", "!!python/object:os.system {}", "[" * 1500])
def test_files_that_are_no_configuration_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        read_document(path)


def test_a_file_that_is_absent_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_document(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_document(tmp_path / "binary.yaml")


@pytest.mark.parametrize("cls", [*SECTIONS.values(), *(get_method_spec(name).config for name in list_methods())])
def test_every_number_has_a_range(cls: type[Any]) -> None:
    """A number far below everything is refused, in a file and in code."""
    for field in fields(cls):
        hint = str(get_type_hints(cls, include_extras=True)[field.name])
        if "int" not in hint and "float" not in hint:
            continue
        wrong = (-1e9,) if "tuple" in hint else -1e9
        with pytest.raises(ConfigError, match=f"section.{field.name} must be"):
            parse_section(cls, {field.name: wrong}, "section")
        with pytest.raises(ValueError, match=field.name):
            cls(**{field.name: wrong})


# -- any input gives a configuration or one message -----------------------------------------------------------------

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 300),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["1e-3", "auto", "timm", "random", "domain", "herding", "cosine", "steady", "vit_tiny", "resnet32"]
    ),
    st.lists(st.one_of(st.integers(-2, 9), st.text(max_size=3), st.floats()), max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)


def keys_of(section: str) -> list[str]:
    if section in SECTIONS:
        return [*(f.name for f in fields(SECTIONS[section])), "normalize", "nesterov"]
    configs = (
        [get_method_spec(name).config for name in list_methods()]
        if section == "method"
        else [optimizer_config(name) for name in list_optimizers()]
    )
    return sorted({f for config in configs for f in config.__pydantic_fields__})


def sections(name: str) -> st.SearchStrategy[Any]:
    names = {
        "method": list_methods(),
        "optimizer": list_optimizers(),
        "data": ["digits", "cifar100", "domainnet", "npz:/x.npz", "folder:"],
        "backbone": ["small_cnn", "vit_smoke", "resnet18_cifar", "timm:deit_tiny_patch16_224"],
    }
    keys = st.one_of(st.sampled_from(keys_of(name)), st.text(max_size=4))
    chosen = st.fixed_dictionaries({"name": st.sampled_from(names[name])} if name in names else {})
    few = st.dictionaries(keys, ODD, max_size=3)
    proper = st.builds(lambda a, b: {**b, **a}, chosen, few)
    return st.one_of(proper, proper, proper, ODD)


CONFIGS = st.fixed_dictionaries(
    {"method": sections("method"), "data": sections("data")},
    optional={
        **{name: sections(name) for name in ("optimizer", "base", "train", "backbone", "stream", "runtime")},
        "preset": st.one_of(st.sampled_from(list(PRESETS)), ODD),
        "seed": st.one_of(st.integers(0, 9), ODD),
        "sead": ODD,
    },
)


def config_or_message(values: dict[str, Any]) -> None:
    try:
        config = resolve_config(values)
    except ConfigError as error:
        message = str(error)
        assert message == message.strip() != ""
        assert message.isprintable()
    else:
        assert parse_config(load_yaml(config.to_yaml())) == config


@given(CONFIGS)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_configuration_is_accepted_or_refused(values: dict[str, Any]) -> None:
    config_or_message(values)


@pytest.mark.slow
@given(CONFIGS)
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
def test_ten_thousand_configurations_are_accepted_or_refused(values: dict[str, Any]) -> None:
    config_or_message(values)


@given(st.lists(st.one_of(st.text(max_size=30), st.from_regex(r"(train|base|seed|method)(\.[a-z_]{1,9})?=.{0,12}"))))
@settings(max_examples=100, deadline=None)
def test_any_override_is_accepted_or_refused(arguments: list[str]) -> None:
    try:
        layer = parse_overrides(arguments)
    except ConfigError:
        return
    config_or_message(merge({"method": "icarl", "data": "digits"}, layer))
