"""Optimizers with settings of their own."""

from __future__ import annotations

import pytest

from cflat._errors import ConfigError
from cflat.config.presets import resolve_config
from cflat.config.variants import list_variants, parse_variant
from cflat.report.groups import title_of


def test_an_entry_carries_settings_of_the_optimizer_and_of_everything_else() -> None:
    variant = parse_variant("c_flat_turbo:reading=calibrated:k=10:base.milestones=[2,4]:base.schedule=multistep")
    config = resolve_config({"method": "icarl", "data": "digits", **variant.layer})
    assert (config.optimizer.name, config.optimizer.settings.k) == ("c_flat_turbo", 10)
    assert (config.base.schedule, list(config.base.milestones)) == ("multistep", [2, 4])
    assert variant.slug == "c_flat_turbo-reading-calibrated-k-10-base.milestones-2-4-base.schedule-multistep"


def test_labels_are_as_written_and_read_like_a_title() -> None:
    assert parse_variant(" sam ").text == "sam"
    assert parse_variant("C-Flat:rho=0.1").text == "c_flat:rho=0.1"
    assert title_of("c_flat:rho=0.1") == "C-Flat, rho=0.1"
    assert title_of("none:base.lr=0.1") == "SGD, base.lr=0.1"
    assert title_of("none", base="adamw") == "AdamW"


def test_commas_in_brackets_do_not_end_an_entry() -> None:
    assert list_variants("none,c_flat:rho=0.1,") == ["none", "c_flat:rho=0.1"]
    assert list_variants("none:base.milestones=[2,4],sam") == ["none:base.milestones=[2,4]", "sam"]


@pytest.mark.parametrize("text", ["sam:rho", "sam:=1", "sam:rho=1:rho=2", "sam:name=c_flat", "sam:", "sma:rho=1"])
def test_what_is_no_entry_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_variant(text)
