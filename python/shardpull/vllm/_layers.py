"""Brings landed checkpoint-format tensors into a running vLLM model, module by module.

vLLM keeps weights in the form of its kernels: repacked, fused, sometimes freed. What a model looked like before, when its
loaders could write into it, is in the metadata of vLLM's layerwise reload; only that metadata is taken from there. The reload
itself is not used: it takes a whole model apart before the first byte has come, and leaves stale what it does not know of.

Here a module is taken apart only while it is processed: the landed tensors stand in the place of its parameters, its
quantisation hook makes the kernels' form of them, that is copied into the memory which the kernels have always used, and the
module has its own tensors back. Between two calls the model can run, and what was not processed has not changed.

What a reload of vLLM's 0.32 gets wrong, and is right here:
- parameters that it leaves out (``bias``, ``e_score_correction_bias``) land beside the model like all others, in the dtype that
  they were loaded in; kernels may hold them in another;
- experts: the hook repacks only for a method that has no kernel yet. The kernel is set aside and put back, since it holds
  the very tensors (biases) that are copied into;
- experts of gpt-oss, whose loader goes by no loader that could be wrapped: what counts here is what landed;
- tied embeddings: loaders see one parameter, and the head packs its own copy again;
- latent attention, which packs the up-projection itself and frees it: the projection stays until that has been done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, SKIP_MODULES, SKIP_TENSORS
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from .._errors import FailedPreconditionError, InvalidArgumentError, UnimplementedError

# Left out of vLLM's metadata, and loaded nevertheless.
_LOADED_IN_PLACE = (SKIP_TENSORS - SKIP_LOAD_TENSORS) | {"e_score_correction_bias"}


@dataclass(frozen=True)
class Loadable:
    """A parameter as the model's loaders see it."""

    name: str
    """Dotted, of the model."""
    module: torch.nn.Module
    tensor: str
    """Its name in the module."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    prototype: torch.Tensor = field(repr=False)
    """Class and attributes, loader included, of the parameter."""

    def made_of(self, storage: torch.Tensor) -> torch.Tensor:
        """`storage` as the parameter: sharing its memory, with the class, loader and attributes that loaders and hooks go by."""
        tensor = storage.detach()
        tensor.__class__ = self.prototype.__class__
        tensor.__dict__ = dict(self.prototype.__dict__)
        restore_layer_refs(tensor, self.module)
        loader = getattr(tensor, "weight_loader", None)
        if loader is not None and getattr(loader, "__name__", "") == "online_process_loader":  # of a reload of vLLM's own
            setattr(tensor, "weight_loader", _get_original_loader(tensor))
        return tensor

    def fits(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == self.dtype and tuple(tensor.shape) == self.shape


@dataclass
class _Tensors:
    """What a module has: parameters, buffers, and which of these are not persistent."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    passing: set[str]

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Tensors:
        return cls(
            {name: tensor for name, tensor in module._parameters.items() if tensor is not None},
            {name: tensor for name, tensor in module._buffers.items() if tensor is not None},
            set(module._non_persistent_buffers_set),
        )

    def place(self, module: torch.nn.Module) -> None:
        """In the place of all that the module has."""
        now = _Tensors.of(module)
        for name in (*now.parameters, *now.buffers):
            delattr(module, name)
        for name, tensor in self.parameters.items():
            module.register_parameter(name, tensor)  # type: ignore[arg-type]
        for name, tensor in self.buffers.items():
            module.register_buffer(name, tensor, persistent=name not in self.passing)

    def all(self) -> dict[str, torch.Tensor]:
        return {**self.parameters, **self.buffers}


class LayerwiseUpdate:
    """The updates of one model: ``begin()``, ``process()`` for each module that got new tensors, ``finish()`` or ``abort()``.

    Raises UnimplementedError for what updates are not exact with, by name. One call at a time, from any thread.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: VllmConfig, device: torch.device) -> None:
        model_config = vllm_config.model_config
        if device.type != "cpu":
            raise UnimplementedError(f"the model is on {device}: only vLLM's CPU backend is supported yet")
        if model_config.quantization is not None:
            raise UnimplementedError(f"updates of a model quantised as {model_config.quantization} are not supported")
        if vllm_config.lora_config is not None:
            raise UnimplementedError("updates of a model with LoRA adapters enabled are not supported")
        if model_config.dtype == torch.float16 and any(name.endswith("sinks") for name, _ in model.named_parameters()):
            raise UnimplementedError("vLLM keeps a copy of float16 attention sinks that updates do not reach: use dtype bfloat16 or float32")
        if hasattr(model, "process_weights_after_loading"):
            raise UnimplementedError(f"{type(model).__name__} has a hook for the whole model, which updates do not run")
        self._model = model
        self._model_config: ModelConfig = model_config
        self._vllm_config = vllm_config
        self._names: dict[torch.nn.Module, str] = {module: name for name, module in model.named_modules()}
        self._untie_what_the_checkpoint_untied()
        self.aliases: dict[str, str] = {}
        """Tied parameters: under which other name they are loaded."""
        self.loadables: dict[str, Loadable] = {}
        """By name; aliases are not among them."""
        self.optional: set[str] = set()
        """Parameters that nothing loads."""
        self._of_module: dict[torch.nn.Module, dict[str, Loadable]] = {}
        self._find_loadables()
        self._processed: set[torch.nn.Module] = set()
        self._lent: dict[torch.nn.Module, _Tensors] = {}
        """Own tensors of modules that have landed ones until attention has read them."""

    @contextmanager
    def checkpoint_format(self, tensors: Mapping[str, torch.Tensor] | None = None) -> Iterator[None]:
        """While it lasts the model has its parameters as its loaders expect them: `tensors`, by name, or on "meta".

        Buffers stay the model's own. The model cannot run meanwhile; afterwards it is exactly as before.
        """
        before: dict[torch.nn.Module, _Tensors] = {}
        aliased: dict[str, torch.Tensor] = {}
        try:
            for module, loadables in self._of_module.items():
                own = before[module] = _Tensors.of(module)
                after = self._never_loaded(own)
                for name, loadable in loadables.items():
                    full = loadable.name
                    if full in self.aliases:
                        after[name] = aliased[self.aliases[full]]
                        continue
                    storage = torch.empty_strided(loadable.shape, loadable.stride, dtype=loadable.dtype, device="meta")
                    after[name] = aliased[full] = loadable.made_of(storage if tensors is None else tensors[full])
                _Tensors(after, own.buffers, own.passing).place(module)
            yield
        finally:
            for module, own in before.items():
                own.place(module)

    def begin(self) -> None:
        """Starts an update; one that was left unfinished is aborted."""
        self.abort()

    def process(self, module: torch.nn.Module, landed: Mapping[str, torch.Tensor]) -> None:
        """Brings a module's new tensors, by their names in it, into its kernels' memory.

        `landed` has the geometry of the module's loadables and is only read after this by ``finish()``. All of the
        module's parameters are given, but for those that the kernels hold as loaders see them: these keep what they have.
        """
        loadables = self._of_module.get(module, {})
        title = self._names.get(module, type(module).__name__)
        if is_deferred_attention_layer(module):
            raise UnimplementedError(f"{title} is an attention layer with tensors of its own ({', '.join(landed)}), which is not supported")
        info = get_layerwise_info(module)
        own = _Tensors.of(module)
        if info.can_load() and info.kernel_tensors is not None:  # a worker that has taken the model apart itself
            own = _Tensors(info.kernel_tensors[0], info.kernel_tensors[1], info.kernel_non_persistent_buffers)
        given = self._never_loaded(own)
        for name, tensor in landed.items():
            loadable = loadables.get(name)
            if loadable is None or loadable.name in self.aliases:
                raise InvalidArgumentError(f"'{name}' is nothing that {title} loads", tensor=f"{title}.{name}")
            if not loadable.fits(tensor):
                raise InvalidArgumentError(
                    f"{loadable.name} is loaded as {loadable.dtype} {loadable.shape}, not {tensor.dtype} {tuple(tensor.shape)}", tensor=loadable.name
                )
            given[name] = loadable.made_of(tensor)
        for name, loadable in loadables.items():
            if name in landed:
                continue
            kept = own.parameters.get(name)
            if kept is None or not loadable.fits(kept):
                raise InvalidArgumentError(
                    f"{title} gets new tensors ({', '.join(landed)}) but none for {name}, of which only the kernel's form is left", tensor=loadable.name
                )
            given[name] = kept
        lent = None
        try:
            _Tensors(given, own.buffers, own.passing).place(module)
            self._run_hook(module)
            lent = self._copy(title, _Tensors.of(module), own)
        finally:
            (lent or own).place(module)
        if lent is not None:
            self._lent.setdefault(module, own)
        if info.can_load():
            info.reset()  # finalisation is to leave it alone
        self._processed.add(module)

    def finish(self) -> None:
        """Completes what no module's own tensors complete: tied heads, and what attention derives from its projections."""
        shared = {id(tensor) for module in self._processed for tensor in module._parameters.values() if tensor is not None}
        with self._context():
            for module in self._names:
                if isinstance(module, VocabParallelEmbedding) and module not in self._processed and id(module.weight) in shared:
                    self._run_hook(module)
            for module in self._names:
                if is_deferred_attention_layer(module) and self._fed(module):
                    module.process_weights_after_loading(self._model_config.dtype)  # type: ignore[operator]
        self.abort()

    def abort(self) -> None:
        """Ends an update: modules processed so far keep their new tensors, and all others the old ones."""
        for module, own in self._lent.items():
            own.place(module)
        self._lent.clear()
        self._processed.clear()

    @staticmethod
    def _never_loaded(own: _Tensors) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in own.parameters.items() if name in SKIP_LOAD_TENSORS - _LOADED_IN_PLACE}

    def _fed(self, attention: torch.nn.Module) -> bool:
        """Whether this update has what the layer derives its tensors from: latent attention's up-projection may be gone else."""
        projection = getattr(attention, "kv_b_proj", None)
        return projection is None or projection in self._processed

    @contextmanager
    def _context(self) -> Iterator[None]:
        with torch.no_grad(), self._model_config_dtype(), set_current_vllm_config(self._vllm_config):
            yield

    @contextmanager
    def _model_config_dtype(self) -> Iterator[None]:
        """As vLLM's loaders run hooks: tensors that name no dtype are of the model's."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._model_config.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def _run_hook(self, module: torch.nn.Module) -> None:
        method = getattr(module, "quant_method", None)
        if not isinstance(method, QuantizeMethodBase):
            return
        if hasattr(module, "_already_called_process_weights_after_loading"):
            del module._already_called_process_weights_after_loading
        experts = isinstance(method, FusedMoEMethodBase)
        kernel = (method.moe_kernel, method.moe_quant_config) if experts else None
        try:
            if experts:
                method.moe_kernel = None
            with self._context():
                method.process_weights_after_loading(module)
            reconcile: Any = getattr(module, "update_param_tp_status", None)
            if reconcile is not None:  # the hook may have made parameters that count ranks as others do
                reconcile()
        finally:
            if kernel is not None:
                method.moe_kernel, method.moe_quant_config = kernel

    def _copy(self, title: str, made: _Tensors, own: _Tensors) -> _Tensors | None:
        """What the hook made into the module's own memory. Where that was freed, what the module is to have meanwhile."""
        pairs, freed = [], []
        for name, tensor in own.all().items():
            new = made.all().get(name)
            if new is tensor:
                continue
            if new is not None and tensor.numel() == 0 and new.numel() > 0:
                freed.append(name)
            elif new is None or new.dtype != tensor.dtype or new.shape != tensor.shape:
                was, now = ("nothing" if t is None else f"{t.dtype} {tuple(t.shape)}" for t in (tensor, new))
                raise FailedPreconditionError(f"{title}.{name} is {was} in the running model, and {now} made of the new weights")
            else:
                pairs.append((tensor, new))
        for tensor, new in pairs:
            tensor.data.copy_(new.data)
        if not freed:
            return None
        return _Tensors({**own.parameters, **{name: made.parameters[name] for name in freed}}, own.buffers, own.passing)

    def _untie_what_the_checkpoint_untied(self) -> None:
        """A checkpoint with a head of its own, which at first was equal to the embeddings, may bring a different one next time."""
        if not self._model_config.word_embeddings_untied_by_checkpoint:
            return
        embeddings = {id(m.weight) for m in self._names if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)}
        for module in self._names:
            if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings:
                tied = module.weight
                module.weight = torch.nn.Parameter(tied.detach().clone(), requires_grad=False)
                module.weight.__dict__.update(tied.__dict__)

    def _find_loadables(self) -> None:
        first: dict[int, str] = {}
        for module, title in self._names.items():
            if type(module).__name__ in SKIP_MODULES:
                continue
            own = _Tensors.of(module)
            parameters, _ = get_layerwise_info(module).restore_metadata
            found = {**parameters, **{name: tensor for name, tensor in own.parameters.items() if name in _LOADED_IN_PLACE}}
            self.optional.update(f"{title}.{name}" for name in self._never_loaded(own))
            for name, prototype in found.items():
                full = f"{title}.{name}" if title else name
                if isinstance(prototype, torch.nn.parameter.UninitializedParameter):
                    raise UnimplementedError(f"{full} has no shape until it is loaded, which updates do not support", tensor=full)
                loadable = Loadable(
                    full, module, name, self._loaded_dtype(module, name, prototype), tuple(prototype.shape), tuple(prototype.stride()), prototype
                )
                self._of_module.setdefault(module, {})[name] = loadable
                kernel = own.parameters.get(name)
                if kernel is not None and first.setdefault(id(kernel), full) != full:
                    self.aliases[full] = first[id(kernel)]
                else:
                    self.loadables[full] = loadable

    def _loaded_dtype(self, module: torch.nn.Module, name: str, prototype: torch.Tensor) -> torch.dtype:
        """Of a bias there is only the kernel's, which may be wider: rounding has to be that of loading."""
        dtype: torch.dtype = prototype.dtype
        if name == "bias" and isinstance(module, LinearBase):
            dtype = module.params_dtype
        elif name == "bias" and isinstance(module, ParallelLMHead):
            dtype = self._model_config.dtype
        return dtype
