#include "tensor/chain_text.h"

#include <charconv>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/limits.h"
#include "base/status_macros.h"

namespace shardpull {
namespace {

class ChainReader {
 public:
  explicit ChainReader(std::string_view text) : text_(text) {}

  Result<OpChain> read() {
    OpChain chain;
    while (at_ < text_.size()) {
      if (chain.size() == kMaxOpsPerChain) {
        return Status(StatusCode::kInvalidArgument,
                      fmt::format("the chain has more than {} operations", kMaxOpsPerChain),
                      {.reason = Reason::kLimit});
      }
      if (take("[")) {
        SHARDPULL_ASSIGN_OR_RETURN(Op op, index());
        chain.push_back(std::move(op));
      } else if (take(".")) {
        SHARDPULL_ASSIGN_OR_RETURN(Op op, call());
        chain.push_back(std::move(op));
      } else {
        return wrong("an operation");
      }
    }
    return chain;
  }

 private:
  Status wrong(std::string_view expected) const {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("the chain has no {} at offset {}", expected, at_),
                  {.reason = Reason::kBadArgument});
  }

  bool take(std::string_view token) {
    if (!text_.substr(at_).starts_with(token)) return false;
    at_ += token.size();
    return true;
  }

  // Letters, digits and underscores.
  std::string_view word() {
    const std::size_t begin = at_;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      const bool in_word =
          (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
      if (!in_word) break;
      ++at_;
    }
    return text_.substr(begin, at_ - begin);
  }

  std::optional<std::int64_t> integer() {
    std::int64_t value = 0;
    const char* const begin = text_.data() + at_;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
    if (error != std::errc()) return std::nullopt;
    at_ += static_cast<std::size_t>(end - begin);
    return value;
  }

  Result<std::vector<std::int64_t>> list() {
    std::vector<std::int64_t> values;
    if (take("]")) return values;
    do {
      const auto value = integer();
      if (!value) return wrong("integer");
      values.push_back(*value);
    } while (take(", "));
    if (!take("]")) return wrong("\"]\"");
    return values;
  }

  Result<OpArg> argument() {
    if (take("[")) {
      SHARDPULL_ASSIGN_OR_RETURN(auto values, list());
      return OpArg(std::move(values));
    }
    if (const auto value = integer()) return OpArg(*value);
    const std::string_view name = word();
    if (const auto dtype = dtype_from_name(name); dtype.ok()) return OpArg(*dtype);
    at_ -= name.size();
    return wrong("integer, list or dtype");
  }

  Result<Op> call() {
    Op op;
    op.method = std::string(word());
    if (op.method.empty()) return wrong("method");
    if (!take("(")) return wrong("\"(\"");
    if (take(")")) return op;
    do {
      SHARDPULL_ASSIGN_OR_RETURN(OpArg value, argument());
      op.args.push_back(std::move(value));
    } while (take(", "));
    if (!take(")")) return wrong("\")\"");
    return op;
  }

  Result<IndexItem> item() {
    if (take("...")) return IndexItem(IndexEllipsis{});
    if (take("None")) return IndexItem(IndexNone{});
    const auto first = integer();
    if (!take(":")) {
      if (!first) return wrong("index");
      return IndexItem(*first);
    }
    IndexSlice slice{.start = first, .stop = integer(), .step = std::nullopt};
    if (take(":")) {
      slice.step = integer();
      if (!slice.step) return wrong("step");
    }
    return IndexItem(slice);
  }

  Result<Op> index() {
    std::vector<IndexItem> items;
    if (!take("()")) {
      do {
        SHARDPULL_ASSIGN_OR_RETURN(IndexItem next, item());
        items.push_back(std::move(next));
      } while (take(", "));
    }
    if (!take("]")) return wrong("\"]\"");
    return Op{"__getitem__", {std::move(items)}};
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

Result<OpChain> parse_chain(std::string_view text) {
  return ChainReader(text).read();
}

}  // namespace shardpull
