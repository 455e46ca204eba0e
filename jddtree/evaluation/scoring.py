"""How answers are read and compared, as the data sets define it: numbers, boxed formulas, code blocks, pass@k.

Pure functions of text. They raise for nothing that a model may write.
"""

import re
from decimal import Decimal

NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
FINAL_NUMBER = re.compile(r"####\s*(-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+))")
CODE_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)(?:\n?```|\Z)", re.DOTALL)
LONGEST_FORMULA = 2000


def after_thinking(answer: str) -> str:
    """What follows the model's thinking, all of the answer where it did not think."""
    return answer.rsplit("</think>", 1)[-1]


def before_stops(answer: str, stops: tuple[str, ...]) -> str:
    """The answer up to the first of the strings that end it."""
    return answer[: min((place for stop in stops if (place := answer.find(stop)) >= 0), default=len(answer))]


def code_block(answer: str) -> str:
    """The first fenced block of Python or of no language, otherwise the first of any, otherwise the text between
    [BEGIN] and [DONE], otherwise the whole answer.
    """
    blocks = CODE_BLOCK.findall(answer)
    python = [text for language, text in blocks if language.strip().lower() in ("", "py", "python", "python3")]
    if blocks:
        return str((python or [blocks[0][1]])[0])
    return answer.rsplit("[BEGIN]", 1)[-1].split("[DONE]", 1)[0]


def last_tagged(answer: str, tag: str) -> str | None:
    """What stands between the last <tag> and the </tag> behind it, without spaces around; None without such a pair."""
    found = re.findall(f"<{tag}>(.*?)</{tag}>", answer, re.DOTALL)
    return found[-1].strip() if found else None


def final_number(answer: str) -> Decimal | None:
    """The number behind the last `####` (GSM8K's own form), otherwise the last number; None without any."""
    found = FINAL_NUMBER.findall(answer) or NUMBER.findall(answer)
    return Decimal(found[-1].replace("$", "").replace(",", "")) if found else None


def last_boxed(answer: str) -> str | None:
    r"""What the last \boxed or \fbox holds, with braces or one bare symbol; None without one that is closed."""
    start = max(answer.rfind("\\boxed"), answer.rfind("\\fbox"))
    if start < 0:
        return None
    rest = answer[start:].split("box", 1)[-1].removeprefix("ed").lstrip()
    return _braced(rest) if rest.startswith("{") else (rest[:1].strip("$") or None)


def _braced(text: str) -> str | None:
    depth = 0
    for place, symbol in enumerate(text):
        depth += (symbol == "{") - (symbol == "}")
        if depth == 0:
            return text[1:place]
    return None


# Applied in this order to a formula without its spaces: what is written in two ways comes out in one.
FORMULA_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\\)\\[!,;: ]|~|\\q?quad\b|\s+|\\displaystyle", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])", ""),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\^\{?\\circ\}?|\\degree\b|\\\$|\$|\\?%", ""),
        (r"\\(?:text|mbox|textbf|mathrm|mathbf|textit)\{([^{}]*)\}", r"\1"),
        (r"\\sqrt([^\[{\\])", r"\\sqrt{\1}"),
        (r"\\frac([0-9a-zA-Z])([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\frac([0-9a-zA-Z])\{", r"\\frac{\1}{"),
        (r"\\frac(\{[^{}]*\})([0-9a-zA-Z])", r"\\frac\1{\2}"),
        (r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
        (r"^(-?)0?\.50*$", r"\1\\frac{1}{2}"),
        (r"(^|[^\d])\.(\d)", r"\g<1>0.\2"),
        (r"^\\frac\{-(\d+)\}\{(\d+)\}$", r"-\\frac{\1}{\2}"),
        (r"^(-?\d+\.\d*?)0+$", r"\1"),
        (r"^[a-zA-Z]{1,2}(?:\([a-z]\))?=(?=.)|\.$", ""),
    )
)


def normal_formula(formula: str) -> str:
    r"""A formula in one spelling, in the spirit of MATH's `is_equiv` but with rules of our own: without spaces, sizes
    of brackets, units (`\text{ cm}` at the end), degree, dollar and percent signs, a leading `x =`; \dfrac, \frac12,
    1/2 and 0.5 become \frac{1}{2}; 1,000 becomes 1000. The value is not computed: 2/4 is not 1/2.
    """
    text = re.sub(r"(?<=.)\\(?:text|mbox|mathrm)\{\s[^{}]*\}(?:\^\{?\d\}?)?$", "", formula[:LONGEST_FORMULA].strip())
    for pattern, replacement in FORMULA_RULES:
        text = pattern.sub(replacement, text)
    return text.replace(",", "") if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text) else text


def same_formula(one: str, other: str) -> bool:
    """Whether two formulas are written the same after `normal_formula`."""
    return normal_formula(one) == normal_formula(other)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Probability that at least one of k samples passes, from `passed` of `samples` that did: the unbiased estimate
    1 - C(samples - passed, k) / C(samples, k) of Chen et al. 2021. ValueError unless passed, k <= samples and k >= 1.
    """
    if not (0 <= passed <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@k needs 0 <= passed <= samples and 1 <= k <= samples, not {passed}, {samples}, {k}")
    all_fail = 1.0
    for row in range(samples - passed + 1, samples + 1):
        all_fail *= max(0.0, 1.0 - k / row)
    return 1.0 - all_fail
