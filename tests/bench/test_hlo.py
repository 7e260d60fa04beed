"""Bytes that a compiled program sends: each form in which XLA writes a collective."""

import pytest

from gradtx.bench.hlo import collective_bytes

# On 4 devices, each of which puts in 100 values of 4 bytes, or those and 20 of 2 bytes.
ONE = {
    "all-gather": (
        "%g = f32[4,100]{1,0} all-gather(f32[1,100]{1,0} %x), replica_groups={{0,1,2,3}}",
        "%g = f32[400]{0:T(1024)S(1)} all-gather(%x), channel_id=1, dimensions={0}",
        "%s = (f32[100]{0}, f32[400]{0}) all-gather-start(f32[100]{0} %x), dimensions={0}",
        "%s = (f32[1,100]{1,0:T(8,128)}, f32[4,100]{1,0:T(8,128)}) all-gather-start(%x)",
    ),
    "all-reduce": (
        "%r = f32[100]{0} all-reduce(f32[100]{0} %x), to_apply=%add",
        "%s = f32[10,10]{1,0} all-reduce-start(f32[10,10]{1,0} %x), to_apply=%add",
    ),
    "all-to-all": (
        "%t = f32[4,25]{1,0} all-to-all(f32[4,25]{1,0} %x), dimensions={0}",
        "%t = (f32[25]{0}, f32[25]{0}, f32[25]{0}, /*index=3*/f32[25]{0}) all-to-all(%a)",
        "%s = ((f32[4,25]{1,0}), f32[4,25]{1,0}, u32[]) all-to-all-start(f32[4,25]{1,0} %x)",
    ),
    "reduce-scatter": (
        "%r = f32[25]{0} reduce-scatter(f32[100]{0} %x), dimensions={0}, to_apply=%add",
        "%s = ((f32[100]{0}), f32[25]{0}) reduce-scatter-start(f32[100]{0} %x), to_apply=%add",
    ),
    "collective-permute": (
        "%p = f32[100]{0} collective-permute(f32[100]{0} %x), source_target_pairs={{0,1},{1,0}}",
        "%s = (f32[100]{0}, f32[100]{0}, u32[], u32[]) collective-permute-start(f32[100]{0} %x)",
    ),
}
TWO = {
    "all-gather": (
        "%g = (f32[400]{0}, bf16[80]{0}) all-gather(%x, %y), dimensions={0}",
        "%s = ((f32[100]{0}, bf16[20]{0}), (f32[400]{0}, bf16[80]{0})) all-gather-start(%x, %y)",
    ),
    "all-reduce": (
        "%r = (f32[100]{0}, bf16[20]{0}) all-reduce(%x, %y), to_apply=%add",
        "%s = (f32[100]{0}, bf16[20]{0}) all-reduce-start(%x, %y), to_apply=%add",
    ),
    "reduce-scatter": (
        "%r = (f32[25]{0}, bf16[5]{0}) reduce-scatter(%x, %y), to_apply=%add",
        "%s = ((f32[100]{0}, bf16[20]{0}), (f32[25]{0}, bf16[5]{0})) reduce-scatter-start(%x, %y)",
    ),
    "collective-permute": (
        "%s = ((f32[100]{0}, bf16[20]{0}), (f32[100]{0}, bf16[20]{0}), u32[], u32[]) "
        "collective-permute-start(%x, %y)",
    ),
}


def cases(forms):
    return [(name, line) for name, lines in forms.items() for line in lines]


@pytest.mark.parametrize(("name", "line"), cases(ONE))
def test_what_one_device_puts_in(name, line):
    assert collective_bytes(f"  {line}\n", 4) == {name: 400}


@pytest.mark.parametrize(("name", "line"), cases(TWO))
def test_several_operands_are_added_up(name, line):
    assert collective_bytes(f"  {line}\n", 4) == {name: 440}


def test_a_start_and_its_end_are_counted_once():
    text = """
      %s = (f32[100]{0}, f32[400]{0}) all-gather-start(f32[100]{0} %x), dimensions={0}
      %d = f32[400]{0} all-gather-done((f32[100]{0}, f32[400]{0}) %s)
      %f = f32[400]{0} fusion(f32[400]{0} %all-gather.1), kind=kLoop, calls=%c
    """
    assert collective_bytes(text, 4) == {"all-gather": 400}


def test_all_of_a_program_are_added_up():
    text = "\n".join(line for _, line in [*cases(ONE), *cases(TWO)])
    expected = {
        name: 400 * len(lines) + 440 * len(TWO.get(name, ())) for name, lines in ONE.items()
    }
    assert collective_bytes(text, 4) == expected


def test_numbers_and_nothing_at_all():
    assert collective_bytes("%r = f32[] all-reduce(f32[] %x), to_apply=%add", 2) == {
        "all-reduce": 4
    }
    assert collective_bytes("%g = u8[0]{0} all-gather(u8[0]{0} %x)", 2) == {"all-gather": 0}
    assert collective_bytes("%a = f32[4]{0} add(%x, %y)", 2) == {}


def test_a_dtype_that_is_not_known_is_refused():
    with pytest.raises(KeyError, match="c64"):
        collective_bytes("%r = c64[2]{0} all-reduce(c64[2]{0} %x)", 2)
