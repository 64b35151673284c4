"""A calculator: one tool, for problems whose arithmetic a small model cannot do in its head.

TRL's contract for `environment_factory`; imports nothing of the kit, so it also runs under `trl.GRPOTrainer`. The
answer is judged by a reward function (`math`), from the model's last message.

    environment: {factory: recipes.environments.calculator:Calculator, max_turns: 3}
"""

import ast
import operator

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
LONGEST = 40  # characters of an expression, which also bounds the digits of its value


class Calculator:
    """Evaluates +, - and * of whole numbers."""

    def reset(self, **columns: object) -> None:
        """Start an episode; a calculator keeps no state."""

    def calculate(self, expression: str) -> str:
        """
        Work out an arithmetic expression.

        Args:
            expression: Whole numbers joined by +, - and *, for example 37*48-5.

        Returns:
            The value.
        """
        if len(expression) > LONGEST:
            raise ValueError(f"the expression has {len(expression)} characters, at most {LONGEST} are read")
        try:
            tree = ast.parse(expression.strip(), mode="eval")
        except SyntaxError:
            raise ValueError(f"{expression!r} is not an expression") from None
        return str(_value(tree.body))


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only whole numbers, +, - and * are read")
