#include "tensor/op_table.h"

#include <set>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shardpull/tensor.h"

namespace shardpull {
namespace {

using ::testing::HasSubstr;

TEST(OpTable, HoldsTheFifteenOperations) {
  std::set<std::string_view> methods;
  for (const OpSpec& op : op_table()) {
    methods.insert(op.method);
    EXPECT_EQ(find_op(op.method), &op);
    EXPECT_THAT(std::string(op.signature), HasSubstr(std::string(op.method)));
    EXPECT_EQ(op.multi_output, op.method == "chunk" || op.method == "split" || op.method == "unbind");
  }
  const std::set<std::string_view> expected = {
      "narrow", "view",    "reshape", "__getitem__", "select", "unsqueeze", "squeeze", "transpose",
      "t",      "permute", "flatten", "contiguous",  "chunk",  "split",     "unbind"};
  EXPECT_EQ(methods, expected);
}

// Goal: what the table lacks is refused by name, with tensor, chain and a reason, in every spelling.
TEST(OpTable, UnknownOperationsAreRefusedByName) {
  const Tensor root = Tensor::fake("model.norm.weight", DType::kBF16, {4, 6}).value();
  const std::pair<const char*, const char*> methods[] = {
      {"add", "computes values"},
      {"__add__", "computes values"},
      {"to", "changes dtype"},
      {"half", "changes dtype"},
      {"cuda", "changes dtype"},
      {"item", "reads values"},
      {"index_select", "no strided"},
      {"expand", "repeats elements"},
      {"clone", "copies"},
      {"data", "copies"},
      {"transpose_", "in place"},
      {"copy_", "in place"},
      {"frobnicate", "not an operation of the table"},
      {"", "not an operation of the table"},
  };
  for (const auto& [method, reason] : methods) {
    const auto result = Tensor::apply(root, {{"t", {}}, {method, {std::int64_t{1}}}});
    ASSERT_FALSE(result.ok()) << method;
    EXPECT_THAT(result.status().message(), HasSubstr("\"" + std::string(method) + "\""));
    EXPECT_THAT(result.status().message(), HasSubstr("model.norm.weight.t()"));
    EXPECT_THAT(result.status().message(), HasSubstr(reason));
    EXPECT_EQ(result.status().info().reason, Reason::kUnsupportedOp);
    EXPECT_EQ(result.status().info().tensor, "model.norm.weight");
  }
}

}  // namespace
}  // namespace shardpull
