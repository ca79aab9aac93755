"""A customer who answers by a script."""

import re
from collections.abc import Collection

from antiphon_envs.tool_user.cases import Case
from antiphon_envs.tool_user.shop import RETURN_DAYS

TOPICS = {  # by topic: the pattern of a question about it; all topics of a question are answered
    "email": re.compile(r"e-?mail"),
    "order": re.compile(r"\b(which|what|your) order\b|order (number|id)|number of (the|your) order"),
    "reason": re.compile(r"\bwhy\b|\breason\b"),
    "address": re.compile(r"(?<!mail )\baddress\b"),
    "variant": re.compile(r"\bvariant\b|\bcolou?r\b"),
    "item": re.compile(r"\b(which|what) (item|product)\b"),
}
_CONFIRM = re.compile(r"\bconfirm|\bgo ahead\b|\bproceed\b|\bshall i\b|\bagree\b")


_NOT_YET = "".join(rf"(?<!{no} {rest})" for no in (" not", "sn't") for rest in ("", "yet ", "been ", "yet been "))
_WORDINGS = {  # patterns of facts that are not amounts
    "cannot": r"cannot|can'?t|can not|unable|impossible|not (possible|allowed|able|eligible|permitted)",
    "shipped": rf"{_NOT_YET}(?:shipped|on its way)",
    "stock": r"stock|sold out|unavailable|not available",
    f"{RETURN_DAYS} days": rf"{RETURN_DAYS}[- ]days?",
}


def mentions_fact(fact: str, message: str) -> bool:
    """Return True if a message mentions a fact.

    >>> mentions_fact("12", "You get $12 back."), mentions_fact("12", "Order 1234 cost 12.50.")
    (True, False)
    """
    text = message.lower().replace(",", "").replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    return re.search(rf"(?<![\w.])({_WORDINGS.get(fact, re.escape(fact))})(?!\w|\.[1-9]|\.\d[1-9])", text) is not None


def mentions_other_reason(facts: Collection[str], message: str) -> bool:
    """Return True if a message gives a reason for a refusal that is not among these facts.

    >>> mentions_other_reason(("cannot", "shipped"), "I cannot: it is shipped or out of stock.")
    True
    """
    return any(mentions_fact(reason, message) for reason in _WORDINGS.keys() - {"cannot", *facts})


class ScriptedCustomer:
    """A customer who begins with a request, answers questions, and confirms what was requested."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.insists = case.insistent
        """True if the customer will not take the next statement as final."""
        self.asked: set[str] = set()
        """The answered topics."""
        self.agreed = False
        """True if the last message was a confirmation."""

    def greet(self) -> str:
        """Return the first message."""
        return self._case.request.text

    def answer(self, message: str) -> str:
        """Answer a message; it is a question if it has a question mark."""
        text = message.lower()
        self.agreed = False
        if "?" not in text:
            if self.insists:
                self.insists = False
                return "Are you sure? Please see what you can do for me."
            return "All right."
        if _CONFIRM.search(text) and self._case.request.action:
            return self._confirm(text)
        topics = [topic for topic, pattern in TOPICS.items() if pattern.search(text)]
        self.asked.update(topics)
        answers = [self._case.answers.get(topic, "I cannot say more about that.") for topic in topics]
        return " ".join(answers) or f"I do not understand. {self._case.request.text}"

    def _confirm(self, text: str) -> str:
        if self._case.number not in text:
            return "Of which order? Tell me its number."
        if self._case.request.action not in text:
            return f"No. {self._case.request.text}"
        self.agreed = True
        return "Yes, I confirm."
