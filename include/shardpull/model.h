// Module, Parameter, Model: the inference worker's side of a bake and of an eager load.
//
// A Model is a tree of modules flattened to dotted names. Each module has parameters; each parameter has a
// shape, a dtype, a loader and (once materialised) memory. `Model::load_weights` is the model's own mapping
// from checkpoint names to loaders: it is run once over fakes (the bake) and may be run over real tensors (an
// eager load); it must not care which.
//
// Thread-compatible: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardpull/api.h"
#include "shardpull/dtype.h"
#include "shardpull/slice.h"
#include "shardpull/source.h"
#include "shardpull/status.h"
#include "shardpull/tensor.h"

namespace shardpull {

class BakeSession;  // src/model/bake.cc
class LoadScope;    // src/model/bake.cc
class Model;
class Module;

// A strided window into one parameter (offset, shape, stride in elements of `dtype`, from the parameter's
// first element): what loaders write into. Views are made by the same op names as on Tensor, with the same
// errors. A value; borrows the Parameter.
class SHARDPULL_API ParameterView {
 public:
  // The parameter that owns the storage: of an alias, the aliased one.
  Parameter& parameter() const { return *parameter_; }
  DType dtype() const { return dtype_; }                               // the window's, not the parameter's
  const std::vector<std::int64_t>& shape() const { return shape_; }    // in elements of dtype()
  const std::vector<std::int64_t>& stride() const { return stride_; }  // in elements of dtype()
  std::int64_t offset() const { return offset_; }                      // from the parameter's first element
  std::string to_string() const;  // "model.norm.weight+8 BF16 [8]"

  // A window within this one, as PyTorch's method of this name:
  Result<ParameterView> narrow(std::int64_t dim, std::int64_t start, std::int64_t length) const;
  Result<ParameterView> select(std::int64_t dim, std::int64_t index) const;
  Result<ParameterView> transpose(std::int64_t d0, std::int64_t d1) const;
  Result<ParameterView> view(std::vector<std::int64_t> sizes) const;
  Result<ParameterView> view(DType dtype) const;
  Result<ParameterView> index(std::vector<IndexItem> items) const;  // param.data[region]
  // Any window of the same dtype, offset from the parameter's first element. Bounds and overlap are checked
  // by the sink.
  Result<ParameterView> as_strided(std::int64_t offset, std::vector<std::int64_t> shape,
                                   std::vector<std::int64_t> stride) const;
  // The same over another dtype, all numbers in its elements.
  Result<ParameterView> as_strided(DType dtype, std::int64_t offset, std::vector<std::int64_t> shape,
                                   std::vector<std::int64_t> stride) const;

  // The sink. Shapes must be equal once leading 1s of the destination are dropped; no broadcasting. When
  // `source` is fake the copy is recorded, when it is real the bytes move at once. Another dtype than the
  // source's is converted with PyTorch's rounding. Refused before anything is recorded or written: a region
  // outside the parameter, one that overlaps itself, other shapes (both are named), a conversion the copy
  // kernels lack, a real tensor while the model bakes, a real tensor for a parameter without memory.
  Status copy_(const Tensor& source) const;
  // Fills the window with zero bytes. Recorded (as a region that takes no source) while the model bakes,
  // immediate otherwise.
  Status zero_() const;

 private:
  friend class Module;
  friend class Parameter;
  ParameterView(Parameter* parameter, DType dtype, std::vector<std::int64_t> shape,
                std::vector<std::int64_t> stride, std::int64_t offset)
      : parameter_(parameter),
        dtype_(dtype),
        shape_(std::move(shape)),
        stride_(std::move(stride)),
        offset_(offset) {}
  template <typename Operation>
  Result<ParameterView> derived(const char* name, const Operation& operation) const;
  Status check_region() const;

  Parameter* parameter_;
  DType dtype_;
  std::vector<std::int64_t> shape_, stride_;
  std::int64_t offset_;
};

// Loads one checkpoint tensor into a parameter. `shard` says which fused part the tensor is ("q", "0", ""
// when unfused).
using Loader = std::function<Status(Parameter&, const Tensor& loaded, const std::string& shard)>;

// Runs after a module's last scatter: reads the module's parameters, writes derived bytes to `outputs`
// (module-owned kernel storage by index; none yet). On the post-process thread; with staged apply, within the commit.
using PostProcess = std::function<Status(Module&, const std::vector<std::byte*>& outputs)>;

// One parameter of a module: shape, dtype, loader and memory. Made and owned by its Module.
class SHARDPULL_API Parameter {
 public:
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;

  Module& module() const { return *module_; }        // that it is of
  const std::string& name() const { return name_; }  // "weight"
  std::string full_name() const;                     // "model.layers.0.self_attn.qkv_proj.weight"
  DType dtype() const { return dtype_; }             // of its elements
  const std::vector<std::int64_t>& shape() const { return shape_; }    // in elements
  const std::vector<std::int64_t>& stride() const { return stride_; }  // in elements
  std::int64_t numel() const;                        // elements
  std::uint64_t storage_bytes() const;  // bytes from the first to past the last addressable element
  const Loader& loader() const { return loader_; }  // null: the default loader (whole copy_)
  // Calls the loader, or the default one. While it runs, copies into this parameter's storage count as this
  // parameter's; calls nest. A copy made outside any load() is unattributed and keeps its module from baking.
  Status load(const Tensor& loaded, const std::string& shard = "");

  // The whole parameter as a destination.
  ParameterView data();

  // True when no source needs to feed it: a buffer. It is left alone then, and counts for nothing; once
  // something writes into it, it must be covered like any other.
  bool optional() const { return optional_; }
  // The parameter whose storage this one is another view of; itself when it owns its storage:
  Parameter& storage() { return storage_ == nullptr ? *this : *storage_; }
  const Parameter& storage() const { return storage_ == nullptr ? *this : *storage_; }
  bool is_alias() const { return storage_ != nullptr; }  // whether that is another one

  // Memory. Null until Model::materialise or bind gave it some, and while the model bakes. Owned by the model
  // unless bound.
  std::byte* memory() const;
  // Points the parameter at `memory`, borrowed for the model's life or until the next bind; null unbinds.
  // Refused: fewer than storage_bytes() bytes, an alias, while the model bakes.
  Status bind(std::byte* memory, std::uint64_t bytes);

  // Regions that no source feeds and that are never "missing" (vocabulary rows up to a multiple of 64).
  // Filled with zero bytes on every sync and on every eager load: the documented padding policy.
  const std::vector<Region>& padding() const { return padding_; }
  // What materialise writes into a buffer. Empty: the fill.
  const std::vector<std::byte>& initial() const { return initial_; }

 private:
  friend class Module;
  friend class Model;
  Parameter() = default;

  Module* module_ = nullptr;
  std::string name_;
  DType dtype_ = DType::kF32;
  std::vector<std::int64_t> shape_, stride_;
  Loader loader_;
  std::byte* memory_ = nullptr;
  std::vector<Region> padding_;
  bool optional_ = false;
  Parameter* storage_ = nullptr;    // the aliased parameter
  std::vector<std::byte> initial_;  // what materialise writes; empty: the fill
};

// One module: a name and its parameters. Made and owned by its Model.
class SHARDPULL_API Module {
 public:
  const std::string& name() const { return name_; }  // dotted, "" for the root
  const std::string& type() const { return type_; }  // "QKVParallelLinear"
  std::uint32_t index() const { return index_; }     // position in Model::modules()
  Model& model() const { return *model_; }           // that it is of
  // Those that own storage, in the order they were added.
  const std::vector<std::unique_ptr<Parameter>>& parameters() const { return parameters_; }
  // Those that are another view of some parameter's storage, in the order they were added.
  const std::vector<std::unique_ptr<Parameter>>& aliases() const { return aliases_; }
  Parameter* find(std::string_view parameter) const;  // aliases too; null when absent

  // Adds a parameter that some source must feed. Contiguous. `loader` null = default loader. Refused: a
  // duplicate name, a bad shape, while the model bakes or after it was materialised.
  Result<Parameter*> add_parameter(std::string name, DType dtype, std::vector<std::int64_t> shape,
                                   Loader loader = nullptr);
  // The same with strides in elements; the gaps between its elements are never written.
  Result<Parameter*> add_strided_parameter(std::string name, DType dtype, std::vector<std::int64_t> shape,
                                           std::vector<std::int64_t> stride, Loader loader = nullptr);
  // Adds an optional parameter (a buffer). `initial` are its bytes when the model is materialised; empty: the
  // fill.
  Result<Parameter*> add_buffer(std::string name, DType dtype, std::vector<std::int64_t> shape,
                                std::vector<std::byte> initial = {}, Loader loader = nullptr);
  // Adds another name and shape for the storage of `target` (contiguous, of any module of the same model). It
  // is written once, wherever it is reached from, and covered with its target.
  Result<Parameter*> add_alias(std::string name, Parameter& target, std::vector<std::int64_t> shape);
  // Declares rows [first, end) of dim 0 as padding.
  Status declare_padding_rows(std::string_view parameter, std::int64_t first, std::int64_t end);
  // Declares a window of the parameter (offset and strides in its elements) as padding. Refused: one that
  // lies outside the parameter or overlaps itself, and as above.
  Status declare_padding(std::string_view parameter, Region region);
  void set_post_process(PostProcess hook) { post_process_ = std::move(hook); }  // null: none
  const PostProcess& post_process() const { return post_process_; }             // null: none

 private:
  friend class Model;
  Module() = default;
  Result<Parameter*> add(std::string name, DType dtype, std::vector<std::int64_t> shape,
                         std::vector<std::int64_t> stride, Loader loader);

  Model* model_ = nullptr;
  std::string name_, type_;
  std::uint32_t index_ = 0;
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::vector<std::unique_ptr<Parameter>> aliases_;
  PostProcess post_process_;
};

// Fake or real checkpoint tensors by name, in the source's order, as load_weights receives them.
struct NamedTensor {
  std::string name;  // of the checkpoint
  Tensor tensor;     // the whole one
};

// A worker's model; derive from it to say what load_weights does.
class SHARDPULL_API Model {
 public:
  Model();
  virtual ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // The model's own mapping from checkpoint tensors to loaders. A name the worker does not keep (another
  // pipeline stage, a tied head) is skipped; a name the model cannot explain is an error naming it. May be
  // given a part of the names.
  virtual Status load_weights(const std::vector<NamedTensor>& weights) = 0;
  // Why a name that fed nothing is legal here: "other stage", "tied head", "unused buffer" ...; empty =
  // cannot be explained.
  virtual std::string explain_unused(std::string_view checkpoint_name) const {
    (void)checkpoint_name;
    return {};
  }
  // The checkpoint names that may feed a parameter, for messages about one that nothing feeds. May be empty.
  virtual std::vector<std::string> sources_of(const Parameter& parameter) const {
    (void)parameter;
    return {};
  }

  // Adds a module. Refused: a name that exists already, while the model bakes or after it was materialised.
  Result<Module*> add_module(std::string name, std::string type);
  // Makes `alias` another path of an existing module (tied embeddings share the module): find_module finds
  // it, a bake counts it once. Refused: a name that exists already.
  Status add_module_alias(std::string alias, Module& target);
  // In the order in which they were added.
  const std::vector<std::unique_ptr<Module>>& modules() const { return modules_; }
  Module* find_module(std::string_view name) const;  // null when absent
  // The other paths of modules, ascending.
  std::vector<std::pair<std::string, Module*>> module_aliases() const;

  // Gives every parameter memory: one allocation a parameter, filled with `fill` (buffers with their initial
  // bytes), with `guard_bytes` of the same fill before and after. Called again it is a no-op.
  // RESOURCE_EXHAUSTED naming the parameter when there is no memory; nothing is materialised then.
  Status materialise(std::byte fill = std::byte{0}, std::uint64_t guard_bytes = 0);
  // First guard byte that is not `fill` any more, as an error naming parameter and offset; OK when intact.
  Status check_guards() const;
  std::uint64_t parameter_bytes() const;  // of elements, without guards and gaps
  std::uint64_t parameter_count() const;  // elements

  // True while a bake runs load_weights.
  bool baking() const { return recorder_ != nullptr; }

 private:
  friend class BakeSession;
  friend class LoadScope;
  friend class Module;
  friend class Parameter;
  friend class ParameterView;
  struct Storage;

  // Whether loaders may write into the module now.
  bool takes_writes(const Module& module) const { return loaded_ == nullptr || (*loaded_)[module.index()]; }

  std::vector<std::unique_ptr<Module>> modules_;
  std::map<std::string, Module*, std::less<>> by_name_;  // aliases too
  std::unique_ptr<Storage> storage_;
  std::vector<Parameter*> stamps_;  // the loaders that are running, innermost last
  Recorder* recorder_ = nullptr;    // set while baking
  const std::vector<bool>* loaded_ = nullptr;  // by module: set while only some are loaded
};

}  // namespace shardpull
