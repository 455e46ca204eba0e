"""Reading and comparing answers: known right and wrong ones for every scorer."""

from decimal import Decimal
from itertools import combinations

import pytest

from jddtree.evaluation.tasks.scoring import (
    after_thinking,
    before_stops,
    code_block,
    final_number,
    last_boxed,
    normal_formula,
    pass_at_k,
    same_formula,
)


@pytest.mark.parametrize(
    "answer, number",
    [
        ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "18"),
        ("#### 18\nCheck: 16 - 3 - 4 = 9.", "18"),
        ("first #### 3, no: #### 4", "4"),
        ("So the answer is $1,234.50.", "1234.5"),
        ("It drops to -7.", "-7"),
        ("a loss of -$20", "-20"),
        ("from 10-3", "3"),
        ("**42**", "42"),
        ("about .5", "0.5"),
        ("5, 6, and 7,", "7"),
        (r"\boxed{$9{,}500}", "9500"),
        ("#### 9{,}500", "9500"),
        (r"#### 9\,500", "9500"),
        (r"#### 9,\!500", "9500"),
        (r"#### 9\!,500", "9500"),
        (r"#### 9{,}\!500", "9500"),
        (r"#### 9\;500", "9500"),
        (r"#### 9\:500", "9500"),
        (r"#### 9\ 500", "9500"),
        (r"#### 9 \, 500", "9500"),
        (r"#### 9{\,}500", "9500"),
        (r"#### 9~500", "9500"),
        ("#### 9\u202f500", "9500"),
        (r"#### 9\text{,}500", "9500"),
        (r"#### 9\mathord{,}500", "9500"),
        (r"#### $9{,}500$", "9500"),
        (r"#### \$9{,}500", "9500"),
        (r"#### \text{\$9{,}500}", "9500"),
        (r"#### \(9{,}500\)", "9500"),
        (r"#### $\boxed{9{,}500}$", "9500"),
        ("#### **9,500** eggs, not 3", "9500"),
        (r"#### 18\text{ eggs}, not 3", "18"),
        (r"#### -\$20 and 3", "-20"),
        (r"#### $-20$ and 3", "-20"),
        ("#### \u221220 and 3", "-20"),
        (r"1{,}234{,}567.50", "1234567.5"),
        (r"1\,234\,567", "1234567"),
        (r"\mathbf{9{,}500}", "9500"),
        (r"the pair (1,\,200)", "200"),
        (r"5\,6", "6"),
        (r"in 1998~100 came", "100"),
    ],
)
def test_final_number(answer: str, number: str) -> None:
    assert final_number(answer) == Decimal(number)


@pytest.mark.parametrize("answer", ["", "none", "####", "$,.-"])
def test_no_final_number(answer: str) -> None:
    assert final_number(answer) is None


@pytest.mark.parametrize(
    "answer, boxed",
    [
        (r"so $\boxed{12}$.", "12"),
        (r"\boxed{1} but \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{x}", "x"),
        (r"\boxed 7$", "7"),
        (r"\boxed{\text{a}\{b\}}", r"\text{a}\{b\}"),
        (r"\boxed{}", ""),
        (r"\boxed{1", None),
        (r"\boxed", None),
        (r"$\boxed$", None),
        ("12", None),
    ],
)
def test_last_boxed(answer: str, boxed: str | None) -> None:
    assert last_boxed(answer) == boxed


@pytest.mark.parametrize(
    "one, other",
    [
        (r"\dfrac{1}{2}", r"\frac12"),
        ("1/2", "0.5"),
        (".5", r"\tfrac{1}2"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac\pi2)".replace(r"\frac\pi2", r"\frac{\pi}{2}")),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        (r"\$1,000", "1000"),
        (r"10,\!080", "10080"),
        (r"50\%", "50"),
        (r"15\mbox{ cm}^2", "15"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("x = 5", "5"),
        ("5.", "5"),
        ("5.00", "5"),
        (r"\frac{-1}{3}", r"-\frac{1}{3}"),
        (r"10,\!080", "10{,}080"),
        (r"10\,080", "10{,}080"),
        (r"10\text{,}080", "10080"),
        (r"10{,}080.50", "10080.5"),
        (r"\frac{1{,}000}{3}", r"\frac{1000}{3}"),
        (r"\$9{,}500\text{ dollars}", "9500"),
        (r"\text{9{,}500}", "9,500"),
        (r"18\text{cm}", "18"),
        (r"18~\mathrm{cm}^2", "18"),
        ("\u22125", "-5"),
        (r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", r"\begin{pmatrix}1\\-2\end{pmatrix}"),
    ],
)
def test_formulas_that_are_the_same(one: str, other: str) -> None:
    assert same_formula(one, other) and same_formula(other, one)


@pytest.mark.parametrize(
    "one, other",
    [
        ("1", "2"),
        ("", "0"),
        ("-1", "1"),
        (r"\frac{1}{2}", r"\frac{1}{3}"),
        (r"\frac{2}{4}", r"\frac{1}{2}"),
        ("3,5,7", "357"),
        (r"(1,\,200)", "1200"),
        (r"5\text{ or }6", "5"),
        (r"\text{cm}", ""),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "[1,2]"),
        ("10", "1"),
        ("100", "1.00"),
        (r"\sqrt{2}", "2"),
        ("5x-7y+4=0", "0"),
    ],
)
def test_formulas_that_differ(one: str, other: str) -> None:
    assert not same_formula(one, other)


@pytest.mark.parametrize(
    "text",
    [
        "{" * 5000,
        "9\\!" * 9000,
        "9~ " * 9000,
        "\\frac" * 3000,
        "\\text{ " * 3000,
        "1," * 50_000,
        "\ud800",
        "$^{_\\",
        "9" + " " * 50_000,
        "#" * 50_000,
    ],
)
def test_no_formula_is_too_odd(text: str) -> None:
    normal_formula(text), last_boxed(f"\\boxed{{{text}}}"), final_number(text), code_block(text)


@pytest.mark.parametrize(
    "answer, code",
    [
        ("Sure:\n```python\nx = 1\n```\nDone.", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("```bash\npip\n```\nthen\n```python\nx = 1\n```", "x = 1"),
        ("```js\nx\n```", "x"),
        ("```python\nx = 1", "x = 1"),
        ("```python\n```", ""),
        ("Put it between ``` and ```:\n```python\nx = 1\n```\nDone.", "x = 1"),
        ("Use ```python fences.\n\n```python\nx = 1\n```", "x = 1"),
        ("```x = 0``` is inline\n```python\nx = 1\n```", "x = 1"),
        ("1. First:\n   ```python\n   if x:\n       y\n   ```\n", "if x:\n    y"),
        ("- a\n  - b\n\n    ~~~py\n    x = 1\n    ~~~\n", "x = 1"),
        ("> ```python\n> x = 1\n> ```", "x = 1"),
        ("   ```python\n   x = 1\n     y\n   ```", "x = 1\n  y"),
        ("~~~\nx = 1\n~~~", "x = 1"),
        ("~~~python\nx = 1\n```\ny = 2\n~~~", "x = 1\n```\ny = 2"),
        ("````python\nx = 1\n```\ny = 2\n````", "x = 1\n```\ny = 2"),
        ("```python\nx = 1\n`````\nDone.", "x = 1"),
        ("```python\nx = 1\n``` not the end\n", "x = 1\n``` not the end"),
        ("```python\ns = '```'\n```", "s = '```'"),
        ('```python title="a.py"\nx = 1\n```', "x = 1"),
        ("```{.python}\nx = 1\n```", "x = 1"),
        ("```js\nx\n```\n~~~ Python3 \nx = 1", "x = 1"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1"),
        ("<answer>\n```python\nx = 1\n```\n</answer>", "x = 1"),
        ("    ```python\n    x = 0\n    ```\n\n```\nx = 1\n```", "x = 1"),
        ("- a\n  ```python\n  x = 1\n\nThe list has ended.", "x = 1"),
        ("```python\nx = 1\n```\nShorter:\n```python\nx = 2\n```", "x = 1"),  # the first counts
        ("[BEGIN]\nx = 1\n[DONE] and more", "\nx = 1\n"),
        ("x = 1", "x = 1"),
    ],
)
def test_code_block(answer: str, code: str) -> None:
    assert code_block(answer) == code


def test_stops_and_thinking() -> None:
    assert before_stops("  return 1\n\ndef g():\n#", ("\n#", "\ndef")) == "  return 1\n"
    assert before_stops("abc", ("x",)) == before_stops("abc", ()) == "abc"
    assert after_thinking("<think>a 3</think>4") == after_thinking("4") == "4"
    assert after_thinking("\n<think>a 3") == after_thinking("a 3</think>") == ""


@pytest.mark.parametrize(
    "samples, passed, k", [(5, 2, 1), (5, 2, 3), (5, 2, 4), (5, 0, 2), (5, 5, 5), (1, 1, 1), (6, 1, 6)]
)
def test_pass_at_k_is_the_share_of_draws_with_a_pass(samples: int, passed: int, k: int) -> None:
    draws = list(combinations(range(samples), k))
    share = sum(min(draw) < passed for draw in draws) / len(draws)
    assert pass_at_k(samples, passed, k) == pytest.approx(share)


@pytest.mark.parametrize("samples, passed, k", [(5, 6, 1), (5, -1, 1), (5, 1, 6), (5, 1, 0), (0, 0, 1)])
def test_pass_at_k_rules_out_what_has_no_meaning(samples: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(samples, passed, k)
