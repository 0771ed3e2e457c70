"""Presets against the tables they come from."""

from __future__ import annotations

import pytest

from cflat import ConfigError
from cflat.config.presets import PRESETS, default_preset, resolve_config
from cflat.config.run_config import RunConfig
from cflat.data import dataset_spec, list_datasets
from cflat.methods import get_method_spec, list_methods
from cflat.optim import list_optimizers, optimizer_settings

DATASETS = [f"{spec.name}:/data" if spec.takes_path else spec.name for spec in list_datasets()]


def resolve(
    method: str | dict[str, object], data: str, preset: str, backbone: str | None = None, **chosen: object
) -> RunConfig:
    section = {"weights": "timm", **({"name": backbone} if backbone else {})}
    return resolve_config({"method": method, "data": data, "preset": preset, "backbone": section, **chosen})


@pytest.mark.parametrize("method", list_methods())
@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_method_has_settings_on_every_dataset(method: str, preset: str) -> None:
    for data in DATASETS:
        spec = get_method_spec(method)
        if dataset_spec(data).is_light and preset in ("paper", "pilot"):
            continue
        if dataset_spec(data).holds_vectors and "other" not in spec.families:
            continue
        config = resolve(method, data, preset)
        assert config.preset == preset
        if spec.needs_memory:
            budgets = (config.method.settings.memory_total, config.method.settings.memory_per_class)
            assert sum(budget is not None for budget in budgets) == 1


@pytest.mark.parametrize("optimizer", list_optimizers())
@pytest.mark.parametrize("preset", list(PRESETS))
def test_an_optimizer_is_the_same_with_every_preset_and_dataset(optimizer: str, preset: str) -> None:
    """A name means one algorithm: presets set the radius of methods, and nothing else."""
    defaults = {key: value for key, value in optimizer_settings(optimizer).items() if key not in ("rho", "options")}
    for data in DATASETS:
        if dataset_spec(data).is_light and preset in ("paper", "pilot"):
            continue
        for method in ("finetune", "icarl", "ease"):
            if dataset_spec(data).holds_vectors and "other" not in get_method_spec(method).families:
                continue
            found = resolve(method, data, preset, optimizer=optimizer).optimizer.keywords()
            assert {key: found.get(key, value) for key, value in defaults.items()} == defaults
            assert found.keys() <= {*defaults, "rho", "options"}


@pytest.mark.parametrize(
    ("method", "epochs", "lr", "batch_size", "rho"),
    [
        ("icarl", 20, 1e-3, 32, 0.1),
        ("memo", 20, 1e-3, 32, 0.1),
        ("l2p", 5, 2e-3, 16, 0.02),
        ("ranpac", 5, 1e-2, 16, 0.05),
        ("ease", 5, 2.5e-3, 16, 0.05),
    ],
)
def test_paper_is_the_table_of_the_appendix(method: str, epochs: int, lr: float, batch_size: int, rho: float) -> None:
    if method not in list_methods():
        pytest.skip(f"{method} is not there yet")
    config = resolve(method, "cifar100", "paper", optimizer="c_flat_turbo")
    assert (config.train.epochs, config.base.lr, config.train.batch_size) == (epochs, lr, batch_size)
    turbo = config.optimizer.settings
    assert (turbo.rho, turbo.lam, turbo.k, turbo.beta) == (rho, 0.2, 5, 0.8)
    assert (config.stream.initial, config.stream.increment) == (10, 10)
    if get_method_spec(method).needs_memory:
        assert config.method.settings.memory_total == 20 * 100


@pytest.mark.parametrize("preset", ["paper", "pilot"])
@pytest.mark.parametrize("data", ["cifar100", "imagenet_r"])
@pytest.mark.parametrize(
    ("method", "choices"),
    [
        ("memo", {"align": False, "specialised_init": "random"}),
        ("ranpac", {"scoring": "cosine"}),
        ("dualprompt", {"legacy_layout": True, "untrained_experts": True}),
        ("duct", {"normalize_plan": False, "sinkhorn": "plain"}),
    ],
)
def test_the_paper_ran_pilots_choices_and_our_default_is_another(
    method: str, choices: dict[str, object], data: str, preset: str
) -> None:
    settings = resolve(method, data, preset).method.settings
    assert {key: getattr(settings, key) for key in choices} == choices
    usual = get_method_spec(method).config()
    assert all(getattr(usual, key) != value for key, value in choices.items())


def test_the_paper_has_sgd_for_all_but_prompts() -> None:
    for method in ("icarl", "memo", "ranpac", "ease", "aper", "duct"):
        for data in ("cifar100", "cub200", "imagenet_r", "objectnet"):
            assert resolve(method, data, "paper").base.name == "sgd"
    assert resolve("ease", "objectnet", "pilot").base.name == "adam"
    assert (resolve("l2p", "cifar100", "paper").base.name, resolve("dualprompt", "cub200", "paper").base.name) == (
        *("adam", "adam"),
    )


@pytest.mark.parametrize("method", ["icarl", "memo"])
def test_what_the_papers_table_leaves_out_is_the_toolboxes(method: str) -> None:
    config = resolve(method, "cifar100", "paper")
    assert (config.base.weight_decay, config.base.first_weight_decay) == (2e-4, 5e-4)
    assert config.method.settings.memory_total == 2000
    each = resolve({"name": method, "memory_per_class": 20}, "cifar100", "paper").method.settings
    assert (each.memory_total, each.memory_per_class) == (None, 20)  # the other reading of "Exemplar 20"


@pytest.mark.parametrize(
    ("method", "data", "epochs", "lr", "batch_size", "weight_decay"),
    [
        ("aper", "cifar100", 20, 0.01, 48, 5e-4),
        ("aper", "cub200", 20, 0.01, 48, 5e-4),
        ("aper", "imagenet_r", 10, 0.05, 16, 5e-3),
        ("ranpac", "cub200", 20, 0.01, 48, 5e-4),
        ("ranpac", "imagenet_r", 10, 0.05, 16, 5e-3),
    ],
)
def test_adapters_have_the_rows_of_the_toolbox_and_the_authors(
    method: str, data: str, epochs: int, lr: float, batch_size: int, weight_decay: float
) -> None:
    for preset in ("paper", "pilot"):
        config = resolve(method, data, preset)
        assert (config.train.epochs, config.base.lr, config.train.batch_size) == (epochs, lr, batch_size)
        assert (config.base.weight_decay, config.base.schedule) == (weight_decay, "cosine")


def test_duct_is_pilots_outside_domainnet_and_the_authors_there() -> None:
    pilot, authors = (resolve("duct", data, "pilot").method.settings for data in ("cifar100", "domainnet"))
    assert (pilot.similarity_scales, pilot.reset_sigma, pilot.normalize_plan, pilot.sinkhorn) == (
        True,
        False,
        False,
        "plain",
    )
    assert (authors.similarity_scales, authors.reset_sigma, authors.sinkhorn) == (False, True, "plain")
    assert authors.regularization == 0.01
    office, core50 = (resolve("duct", data, "pilot") for data in ("office_home", "core50"))
    assert (office.train.epochs, office.method.settings.regularization) == (15, 0.1)
    assert (core50.train.epochs, core50.method.settings.backbone_lr_scale) == (10, 0.001)
    assert core50.method.settings.regularization == 0.2
    assert resolve("duct", "domainnet", "paper").method.settings == authors


def test_milestones_from_scratch_are_pycils() -> None:
    for method, later in (("icarl", (80, 120)), ("memo", (80, 120, 150))):
        config = resolve(method, "cifar100", "pilot", backbone="resnet32")
        assert (config.base.first_milestones, config.base.milestones) == ((60, 120, 170), later)


def test_a_network_from_scratch_gets_the_settings_for_that() -> None:
    config = resolve("icarl", "cifar100", "pilot", backbone="resnet32")
    assert (config.train.first_epochs, config.train.epochs, config.base.lr) == (200, 170, 0.1)
    assert (config.method.settings.memory_total, config.backbone.inputs) == (2000, "cifar")


def test_domains_make_a_domain_stream_where_the_method_can() -> None:
    assert resolve("icarl", "domainnet", "paper").stream.scenario == "domain"
    assert resolve("memo", "domainnet", "paper").stream.scenario == "class"


def test_the_users_budget_replaces_the_presets() -> None:
    config = resolve_config({"method": {"name": "icarl", "memory_total": 50}, "data": "digits"})
    assert (config.method.settings.memory_total, config.method.settings.memory_per_class) == (50, None)


@pytest.mark.parametrize("word", [True, "yes", "On"])
def test_an_online_stream_has_one_epoch_however_it_is_asked_for(word: object) -> None:
    config = resolve("derpp", "digits", "cpu", stream={"online": word})
    assert (config.stream.online, config.train.epochs, config.train.anytime_every) == (True, 1, 100)


def test_what_the_user_says_wins() -> None:
    config = resolve("icarl", "cifar100", "paper", train={"epochs": 3}, optimizer={"name": "c_flat", "rho": 0.3})
    assert (config.train.epochs, config.train.batch_size) == (3, 32)
    assert config.optimizer.settings.rho == 0.3


def test_optimizers_with_another_radius_keep_their_own() -> None:
    assert resolve("icarl", "cifar100", "paper", optimizer="asam").optimizer.settings.rho == 0.5


def test_pretrained_weights_are_asked_for_not_assumed() -> None:
    with pytest.raises(ConfigError, match="--weights timm"):
        resolve_config({"method": "icarl", "data": "cifar100", "preset": "paper"})
    assert default_preset("digits") == "cpu"
    assert default_preset("cifar100") == "paper"
