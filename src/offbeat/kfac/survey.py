"""Which layers of a model K-FAC can precondition, and why not the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from torch import nn

from offbeat.errors import ConfigError, nearest
from offbeat.kfac.blocks import EVERYTHING, Block, Covered, LayerBlock, TiedBlock, Use
from offbeat.kfac.curvature import Curvature
from offbeat.kfac.layers import (
    SECOND_DIM,
    BiasBlock,
    ConvBlock,
    EmbeddingBlock,
    LastDimsNormBlock,
    LinearBlock,
    SecondDimNormBlock,
    is_own_rms_norm,
)

SUPPORTED: Final = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Embedding,
    nn.MultiheadAttention,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.GroupNorm,
)

PROJECTIONS: Final = ("q", "k", "v")
"""In the order in which they lie in MultiheadAttention's packed weight."""


class Holder(NamedTuple):
    """A module that has a parameter as its own."""

    name: str
    module: nn.Module


Holders: TypeAlias = Mapping[int, Sequence[Holder]]
"""By the parameter's id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What was found.

    Attributes:
        blocks: in the order of the model's modules; the same on all ranks.
        plain: modules whose trainable parameters get plain gradients, each with the reason.
        num_parameters: trainable ones of the model, each counted once.
    """

    blocks: Sequence[Block]
    plain: Mapping[str, str]
    num_parameters: int

    @property
    def num_covered(self) -> int:
        """Parameters that get preconditioned gradients."""
        return sum(block.num_parameters for block in self.blocks)

    def notice(self) -> str:
        """How much is covered, and what gets plain gradients: one line."""
        covered = (
            f"K-FAC covers {percent(self.num_covered, self.num_parameters)} of"
            f" {self.num_parameters:,} parameters"
        )
        plain = f"; plain gradients for {_listed(self.plain)}" if self.plain else ""
        return covered + plain


def percent(some: int, of_all: int) -> str:
    """A share in percent. It is never rounded up to all, nor down to nothing.

    >>> percent(1, 3), percent(99999, 100000), percent(1, 100000), percent(7, 7)
    ('33.3%', '99.9%', '0.1%', '100%')
    """
    if some == of_all:
        return "100%"
    tenths = min(max(round(1000 * some / of_all), 1), 999) if some else 0
    return f"{tenths / 10:g}%"


def survey(model: nn.Module, curvature: Curvature) -> Survey:
    """Find the blocks of `model`.

    Raises:
        ConfigError: nothing in it can be preconditioned, or `curvature` names a module that is
            none.
    """
    _check_names(model, curvature)
    holders = _holders(model)
    blocks: list[Block] = []
    plain: dict[str, str] = {}
    # Torch's decoder layers attend to the encoder's output, so query and key differ there.
    decoded = {
        id(layer.multihead_attn)
        for layer in model.modules()
        if isinstance(layer, nn.TransformerDecoderLayer)
    }
    claimed: set[int] = set()
    for name, module in model.named_modules():
        own = {
            own_name: parameter
            for own_name, parameter in _trained_of(module)
            if any(holder.module is module for holder in holders[id(parameter)])
        }
        if id(module) in claimed or not (own or isinstance(module, nn.MultiheadAttention)):
            continue
        if any(len(holders[id(parameter)]) > 1 for parameter in own.values()):
            found, reasons, users = _blocks_of_shared(name, module, holders, curvature)
            blocks += found
            plain |= reasons
            claimed |= users
            continue
        reason = _objection(name, module, curvature)
        if reason is None:
            is_cross = id(module) in decoded or name in curvature.cross_attention
            made = _blocks_of(name, module, curvature, is_cross=is_cross)
            blocks += made
            reason = "no weight or bias of a trained projection"  # as attention's `bias_k`
            plain |= _left_over(name, module.named_parameters(), made, reason)
            if isinstance(module, nn.MultiheadAttention):
                # The attention uses the weight of its output projection without calling the module,
                # so the projection is one of the attention's blocks and not a Linear of its own.
                claimed.add(id(module.out_proj))
        elif _has_layers(module):
            plain |= _left_over(name, own.items(), (), "a parameter outside of layers")
        else:
            plain[name or type(module).__name__] = reason
    if not blocks:
        raise ConfigError(
            "K-FAC finds no layer that it can precondition: a Linear, Conv1d, Conv2d, Embedding,"
            " MultiheadAttention or normalisation that is trainable and not overridden"
            f" ({_listed(plain) or 'no parameter is trainable'}); use a strategy for plain"
            " gradients"
        )
    return Survey(
        blocks=blocks,
        plain=plain,
        num_parameters=sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        ),
    )


def _listed(plain: Mapping[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, reason in plain.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())


def _holders(model: nn.Module) -> Holders:
    found: dict[int, list[Holder]] = {}
    for name, module in model.named_modules():
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append(Holder(name, module))
    # What stands beside layers and shows one of their parameters as its own uses it not itself.
    return {
        key: [one for one in each if not _has_layers(one.module)] or each
        for key, each in found.items()
    }


def _has_layers(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and not isinstance(module, SUPPORTED)


def _check_names(model: nn.Module, curvature: Curvature) -> None:
    modules = dict(model.named_modules())
    attentions = [
        name for name, module in modules.items() if isinstance(module, nn.MultiheadAttention)
    ]
    for name in curvature.cross_attention:
        if name not in attentions:
            raise ConfigError(
                f"cross_attention names {name!r}, which is no MultiheadAttention of the"
                f" model{nearest(name, attentions)}; there is {', '.join(attentions) or 'none'}"
            )
    kinds = {type(module).__name__ for module in modules.values()}
    for name in curvature.plain:
        if name not in modules and name not in kinds:
            raise ConfigError(
                f"plain names {name!r}, which is no layer of the model, nor a class of"
                f" one{nearest(name, [*kinds, *modules])}"
            )


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether `module` looks like the Conv1D of `transformers`: a linear layer whose weight has a
    row for each input.
    """
    weight = _own_parameter(module, "weight")
    return (
        any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
        and weight is not None
        and weight.ndim == 2
        and getattr(module, "nf", None) == weight.shape[1]
    )


def _objection(name: str, module: nn.Module, curvature: Curvature) -> str | None:
    """Why `module` cannot be preconditioned, or should not be; None if it is."""
    if name in curvature.plain or type(module).__name__ in curvature.plain:
        return "as option plain says"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return (
            f"the gates of {type(module).__name__} are computed in one fused call, into which K-FAC"
            " cannot see"
        )
    kind = next((kind for kind in SUPPORTED if isinstance(module, kind)), None)
    if kind is None:
        is_known = is_transposed_linear(module) or is_own_rms_norm(module)
        return None if is_known else f"{type(module).__name__} is not supported"
    if type(module).forward is not kind.forward:
        return f"{type(module).__name__} overrides {kind.__name__}.forward"
    if kind is nn.MultiheadAttention:
        return None
    if isinstance(module, nn.Embedding) and (module.sparse or module.scale_grad_by_freq):
        return "its gradient is sparse or scaled by frequency"
    weight = _own_parameter(module, "weight")
    if weight is None:
        return "its weight is computed from other parameters"
    if weight.is_complex():
        return "its weight is complex"
    if weight.requires_grad or isinstance(module, nn.Linear):
        return None
    return "only its bias is trained"


def _blocks_of(name: str, module: Any, curvature: Curvature, *, is_cross: bool) -> Sequence[Block]:
    if isinstance(module, nn.MultiheadAttention):
        return list(_attention_blocks(name, module, curvature, is_cross=is_cross))
    if isinstance(module, nn.Embedding):
        return [EmbeddingBlock(name, module, curvature)]
    bias_name, is_transposed = _trained(module, "bias"), is_transposed_linear(module)
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return [ConvBlock(name, module, curvature, bias_name=bias_name)]
    if not (is_transposed or isinstance(module, nn.Linear)):
        if isinstance(module, SECOND_DIM):
            return [SecondDimNormBlock(name, module, bias_name=bias_name)]
        return [LastDimsNormBlock(name, module, curvature, bias_name=bias_name)]
    if _trained(module, "weight") is None:
        return [BiasBlock(name, module, curvature)]
    return [LinearBlock(name, module, curvature, bias_name=bias_name, is_transposed=is_transposed)]


def _blocks_of_shared(
    name: str, module: nn.Module, holders: Holders, curvature: Curvature
) -> tuple[list[Block], dict[str, str], set[int]]:
    """The blocks of `module`, of which a parameter is also another module's own, and of the others
    that use its weight; what of them gets plain gradients, and all these modules, by their ids.
    """
    weight = _own_parameter(module, "weight")
    users = [] if weight is None or not weight.requires_grad else holders[id(weight)]
    if len(users) < 2:
        users = [Holder(name, module)]
    blocks, reason = _tied_block(users, holders, curvature)
    plain: dict[str, str] = {}
    for user in users:
        own = _trained_of(user.module)
        bias = dict(own).get("bias")
        is_alone = bias is not None and not any(block.bias is bias for block in blocks)
        if blocks and is_alone and len(holders[id(bias)]) == 1:
            blocks.append(BiasBlock(f"{user.name}.bias", user.module, curvature))
        plain |= _left_over(user.name, own, blocks, reason or "it is shared with another layer")
    return blocks, plain, {id(user.module) for user in users}


def _tied_block(
    users: Sequence[Holder], holders: Holders, curvature: Curvature
) -> tuple[list[Block], str]:
    """The block of the weight that `users` share; none, and why."""
    for user in users:
        is_linear = isinstance(user.module, nn.Linear) or is_transposed_linear(user.module)
        reason = _objection(user.name, user.module, curvature)
        if reason is None and not (is_linear or isinstance(user.module, nn.Embedding)):
            reason = f"{type(user.module).__name__} shares parameters"
        if reason is not None:
            return [], f"shared with {user.name!r}, which K-FAC does not cover: {reason}"
    # A weight whose rows are inputs comes first, so that A is there when the forward pass is over.
    ways = [
        [user for user in users if isinstance(user.module, nn.Linear) is is_upright]
        for is_upright in (False, True)
    ]
    ways = [some for some in ways if some]
    if any(len({_kind_of_use(user.module) for user in some}) > 1 for some in ways):
        return [], "shared by layers of different kinds"
    biases = {id(_own_parameter(user.module, "bias")) for user in users}
    has_one_bias = len(ways) == 1 and len(biases) == 1 and _have_one_bias(users, holders)
    uses: list[Use] = []
    for some in ways:
        first = some[0]
        modules, names = [user.module for user in some], [user.name for user in some]
        block: LayerBlock
        if isinstance(first.module, nn.Embedding):
            block = EmbeddingBlock(first.name, first.module, curvature)
        else:
            block = LinearBlock(
                first.name,
                first.module,
                curvature,
                bias_name="bias" if has_one_bias else None,
                is_transposed=is_transposed_linear(first.module),
                outputs=uses[0].block.inputs if uses else None,
            )
        uses.append(Use(block, modules, names, is_flipped=bool(uses)))
    return [TiedBlock(uses)], ""


def _kind_of_use(module: nn.Module) -> tuple[str, object]:
    """Layers of one kind use a shared weight alike."""
    if isinstance(module, nn.Embedding):
        return "Embedding", module.padding_idx
    return ("Conv1D" if is_transposed_linear(module) else "Linear"), None


def _have_one_bias(users: Sequence[Holder], holders: Holders) -> bool:
    """Whether all of `users`, and nobody else, have one and the same trainable bias."""
    shared = _own_parameter(users[0].module, "bias")
    if shared is None or not shared.requires_grad:
        return False
    return {id(holder.module) for holder in holders[id(shared)]} == {
        id(user.module) for user in users
    }


def _trained_of(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The module's own parameters that are trained."""
    return [
        (name, parameter)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter.requires_grad
    ]


def _left_over(
    name: str, own: Iterable[tuple[str, nn.Parameter]], found: Sequence[Block], reason: str
) -> dict[str, str]:
    """What of a module's `own` parameters no block covers, with the reason."""
    covered = {id(parameter) for block in found for parameter in (block.weight, block.bias)}
    return {
        f"{name}.{own_name}".removeprefix("."): reason
        for own_name, parameter in own
        if parameter.requires_grad and id(parameter) not in covered
    }


def _attention_blocks(
    name: str, module: nn.MultiheadAttention, curvature: Curvature, *, is_cross: bool
) -> Iterator[Block]:
    """Self-attention's three projections share an A; others have one each. Then the output
    projection.
    """

    def block(which: str, holder: nn.Module, **options: Any) -> LinearBlock:
        own_name = f"{name}.{which}_proj".removeprefix(".")
        return LinearBlock(own_name, holder, curvature, batch_dim=1, **options)

    bias, packed = _trained(module, "in_proj_bias"), _trained(module, "in_proj_weight")
    if packed is not None and not is_cross:
        groups = len(PROJECTIONS)
        yield block("in", module, weight_name=packed, bias_name=bias, groups=groups)
    else:
        for position, which in enumerate(PROJECTIONS):
            weight_name = packed or _trained(module, f"{which}_proj_weight")
            places = slice(position * module.embed_dim, (position + 1) * module.embed_dim)
            if weight_name is not None:
                rows = EVERYTHING if packed is None else places
                covered = Covered(
                    weight_name=weight_name, bias_name=bias, rows=rows, bias_rows=places
                )
                yield block(which, module, **covered)
    out = module.out_proj
    if _trained(out, "weight") is not None:
        yield block("out", out, bias_name=_trained(out, "bias"))


def _own_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """The parameter of `module` itself; None where a parametrization computes it from others."""
    own = module.named_parameters(recurse=False, remove_duplicate=False)
    return dict(own).get(name)


def _trained(module: nn.Module, name: str) -> str | None:
    parameter = _own_parameter(module, name)
    return name if parameter is not None and parameter.requires_grad else None
