// Tensors by address: what a framework says of one is taken as it is, and the object is held as long as the
// engine may touch its memory.
#include <string>

#include "native.h"

namespace shardpull::python {
namespace {

struct Type {
  DType dtype;
  nb::dlpack::dtype_code code;
  std::uint8_t bits;
};
using Code = nb::dlpack::dtype_code;
constexpr Type kTypes[] = {
    {DType::kBool, Code::Bool, 8},
    {DType::kU8, Code::UInt, 8},
    {DType::kI8, Code::Int, 8},
    {DType::kI16, Code::Int, 16},
    {DType::kU16, Code::UInt, 16},
    {DType::kI32, Code::Int, 32},
    {DType::kU32, Code::UInt, 32},
    {DType::kI64, Code::Int, 64},
    {DType::kU64, Code::UInt, 64},
    {DType::kF16, Code::Float, 16},
    {DType::kF32, Code::Float, 32},
    {DType::kF64, Code::Float, 64},
    {DType::kBF16, Code::Bfloat, 16},
    {DType::kC64, Code::Complex, 64},
    {DType::kF8E4M3, Code::Float8_E4M3FN, 8},
    {DType::kF8E5M2, Code::Float8_E5M2, 8},
    {DType::kF8E8M0, Code::Float8_E8M0FNU, 8},
};

DType dtype_of(nb::dlpack::dtype given, const std::string& what) {
  for (const Type& type : kTypes) {
    if (given.lanes <= 1 && static_cast<Code>(given.code) == type.code && given.bits == type.bits)
      return type.dtype;
  }
  raise_argument(what + " has an element type without a name here (DLPack code " +
                 std::to_string(given.code) + ", " + std::to_string(given.bits) + " bits)");
}

std::int64_t extent_bytes(const TensorView& view) {
  std::int64_t last = 0;
  for (std::size_t d = 0; d < view.shape.size(); ++d) {
    if (view.shape[d] == 0) return 0;
    last += (view.shape[d] - 1) * view.stride[d];
  }
  return (last + 1) * dtype_bits(view.dtype) / 8;
}

// Over memory at an address; strides in elements.
void make_view(View* self, std::uintptr_t data, const std::string& dtype, std::vector<std::int64_t> shape,
               std::vector<std::int64_t> stride, std::uintptr_t storage, std::uint64_t storage_bytes,
               bool writable, nb::object owner) {
  new (self) View();
  self->view = {reinterpret_cast<const std::byte*>(data),
                check(dtype_from_name(dtype)),
                std::move(shape),
                std::move(stride),
                reinterpret_cast<const std::byte*>(storage),
                storage_bytes};
  self->writable = writable;
  self->owner = std::move(owner);
}

View adopt(nb::handle tensor, const std::string& what) {
  nb::ndarray<> array;
  bool writable = true;
  if (!nb::try_cast(tensor, array)) {
    nb::ndarray<nb::ro> readable;
    if (!nb::try_cast(tensor, readable))
      raise_type(what, "a tensor (numpy, torch, DLPack or buffer)", tensor);
    array = nb::ndarray<>(readable);
    writable = false;
  }
  if (array.device_type() != nb::device::cpu::value) raise_argument(what + " must be in CPU memory");
  View out;
  out.view.dtype = dtype_of(array.dtype(), what);
  for (std::size_t d = 0; d < array.ndim(); ++d) {
    out.view.shape.push_back(static_cast<std::int64_t>(array.shape(d)));
    out.view.stride.push_back(array.stride(d));
    if (array.stride(d) < 0) raise_argument(what + " has a negative stride; make a copy of it");
  }
  out.view.data = static_cast<const std::byte*>(array.data_handle()) + array.byte_offset();
  out.view.storage = out.view.data;
  out.view.storage_bytes = static_cast<std::uint64_t>(extent_bytes(out.view));
  out.writable = writable;
  out.owner = nb::borrow(tensor);
  out.array = std::move(array);
  return out;
}

}  // namespace

nb::dlpack::dtype dlpack_of(DType dtype) {
  for (const Type& type : kTypes) {
    if (type.dtype == dtype) return {static_cast<std::uint8_t>(type.code), type.bits, 1};
  }
  raise_argument("DLPack has no " + std::string(dtype_name(dtype)) + " of one element; take memory()");
}

View view_of(nb::handle tensor, const std::string& what) {
  const nb::object view = nb::module_::import_("shardpull._tensors").attr("describe")(tensor, what);
  return nb::cast<View>(view);
}

void bind_tensors(nb::module_& module) {
  nb::class_<View>(module, "TensorView")
      .def("__init__", make_view, nb::arg("data"), nb::arg("dtype"), nb::arg("shape"), nb::arg("stride"),
           nb::arg("storage"), nb::arg("storage_bytes"), nb::arg("writable"), nb::arg("owner"))
      .def_prop_ro("data", [](const View& self) { return reinterpret_cast<std::uintptr_t>(self.view.data); })
      .def_prop_ro("dtype", [](const View& self) { return std::string(dtype_name(self.view.dtype)); })
      .def_prop_ro("shape", [](const View& self) { return nb::tuple(nb::cast(self.view.shape)); })
      .def_prop_ro("stride", [](const View& self) { return nb::tuple(nb::cast(self.view.stride)); })
      .def_prop_ro("storage_bytes", [](const View& self) { return self.view.storage_bytes; })
      .def_ro("writable", &View::writable);
  module.def("adopt", adopt, nb::arg("tensor").none(), nb::arg("what"));
}

NB_MODULE(_native, module) {
  // Engines may live until the interpreter ends.
  nb::set_leak_warnings(false);
  bind_tensors(module);
  bind_model(module);
  bind_bake(module);
  bind_fleet(module);
}

}  // namespace shardpull::python
