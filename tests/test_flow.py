import pytest
from conftest import assert_close, golden

from specar_core.sampling.flow import FlowTable

T, META = golden("krea/sched")


@pytest.mark.parametrize("shift", [5, 8])
def test_table_and_step_lists(shift):
    table = FlowTable(shift)
    assert_close(table.timesteps, T[f"shift{shift}.timesteps"], 2.5e-4)
    assert_close(table.sigmas, T[f"shift{shift}.sigmas"], 2.5e-7)
    warped = table.warped([1000, 750, 500, 250])
    assert warped == pytest.approx(T[f"shift{shift}.sf_denoising_steps"].tolist(), abs=2.5e-4)
    for count in (2, 3, 4, 5, 6, 8):
        steps = T[f"shift{shift}.krea_raw_steps{count}"].tolist()
        assert table.warped(steps) == pytest.approx(T[f"shift{shift}.krea_steps{count}"].tolist(), abs=2.5e-4)


def test_conversions_at_every_probed_time():
    table = FlowTable(5)
    x0, noise, flow = T["probe.x0"], T["probe.noise"], T["probe.flow"]
    times = T["probe.timesteps"].tolist()
    assert 0 in times
    for i, t in enumerate(times):
        assert_close(table.renoise(x0, noise, t), T[f"probe.add_noise.{i}"], 1e-5)
        assert_close(table.x0_from_flow(flow, x0, t), T[f"probe.flow_to_x0.{i}"], 1e-5)
        if t:  # the flow between two known ends, which the sampler itself never needs
            back = (noise.double() - x0.double()) / table.sigma(t)
            assert ((back - T[f"probe.x0_to_flow.{i}"]).abs() / back.abs().clamp_min(1)).max() <= 1e-6


def test_time_zero_is_the_last_entry_and_not_sigma_zero():
    assert FlowTable(5).sigma(0) == pytest.approx(0.004980, abs=1e-6)
    assert FlowTable(8).sigma(0) == pytest.approx(0.007944, abs=1e-6)
