"""Copies, calls and labels that a functional graph does not need, and calls that it needs twice.

An activation that writes over a view, as after an instance norm, is traced with copies of its gradient into new memory
of the same form.  The values are the same without them.  ``detach`` does nothing where no autograd records, and a power
of 1, as in the gradient of a square, does nothing either.  Nor does a view of the same sizes, but it may have other
strides along a dimension of one element than the graph says.
"""

import operator

from torch import fx

from ... import _torch
from ..graph import POLICY, copied, has_own_memory, has_same_form, is_tensor, name_of, roots_of, row_of, value_of

# What a checkpoint in the model writes into the nodes of its calls.
OF_CHECKPOINT = (POLICY, "ac_graph_id")


def simplify(module: fx.GraphModule) -> None:
    """Simplifies a joint graph."""
    parts = _torch.compiler_parts()
    if parts.config.cse:
        module.graph = parts.fx_graph_cse(module.graph)
        split_shared_calls(module.graph)
    remove_copies(module.graph)
    forget_running(module.graph)


def remove_copies(graph: fx.Graph) -> int:
    """Replaces each such copy by what it copies, and returns their number.

    What the graph returns stays apart from its arguments and from all else that it returns.
    """
    count, roots, end = 0, roots_of(graph), graph.output_node()
    returned = {roots[node] for node in end.all_input_nodes}
    for node in list(graph.nodes):
        returns_input = row_of(node).returns_input
        source: object = None
        if name_of(node) == "copy":
            source = node.args[1]
        elif returns_input or name_of(node) == "clone" or (name_of(node) == "pow" and node.args[1] == 1):
            source = node.args[0]
        if not is_tensor(source) or not has_same_form(value_of(source), value_of(node)):
            continue
        root = roots[source]
        if root is not roots[node]:
            is_returned = roots[node] in returned
            if root.op != "call_function" or (is_returned and (root in returned or not has_own_memory(root))):
                continue
            returned |= {root} if is_returned else set()
        # What is returned stays a view.
        node.replace_all_uses_with(source, lambda user, stays=returns_input: user is not end or not stays)
        if not node.users:
            graph.erase_node(node)
            count += 1
    return count


def split_shared_calls(graph: fx.Graph) -> int:
    """Parts calls that the compiler has made one call of although their results must stay apart; returns their number.

    It leaves apart what the graph returns.  So the one call has a result twice, in one memory: an op would write over
    what is returned, and the labels of a checkpoint that held one of the calls would be half of the other call's.
    """
    count = 0
    for call in list(graph.nodes):
        found = set()
        for item in [user for user in call.users if user.target is operator.getitem]:
            if item.args[1] in found:
                own = copied(graph, call, {}, before=call.next)
                own.meta = {name: value for name, value in own.meta.items() if name not in OF_CHECKPOINT}
                own.meta |= {name: item.meta[name] for name in OF_CHECKPOINT if name in item.meta}
                item.args = (own, item.args[1])
                count += 1
            found.add(item.args[1])
    return count


def forget_running(graph: fx.Graph) -> None:
    """Backward of a batch norm in training mode gets no running statistics, which it does not read.

    Otherwise forward would keep copies of them.
    """
    for node in graph.nodes:
        if name_of(node) == "native_batch_norm_backward" and node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])
