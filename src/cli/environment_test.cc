#include "cli/environment.h"

#include <map>

#include <gtest/gtest.h>

namespace shardpull::cli {
namespace {

Environment from(std::map<std::string, std::string> values) {
  return [values = std::move(values)](const char* name) -> std::optional<std::string> {
    const auto found = values.find(name);
    return found == values.end() ? std::optional<std::string>() : found->second;
  };
}

std::string rendezvous(std::map<std::string, std::string> values) {
  const auto found = rendezvous_from(from(std::move(values)));
  if (!found.ok()) return "error: " + found.status().message();
  return found->value_or("none");
}

std::string completed(const std::string& text) {
  const auto full = complete_rendezvous(text, "--rendezvous");
  return full.ok() ? *full : "error: " + full.status().message();
}

TEST(Environment, rank_of_torchrun_comes_before_that_of_slurm) {
  EXPECT_FALSE(rank_from(from({}))->has_value());
  const auto torchrun =
      rank_from(from({{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}}));
  ASSERT_TRUE(torchrun.ok() && torchrun->has_value());
  EXPECT_EQ((*torchrun)->rank, 3u);
  EXPECT_EQ((*torchrun)->size, 4u);
  const auto slurm = rank_from(from({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}}));
  ASSERT_TRUE(slurm.ok() && slurm->has_value());
  EXPECT_EQ((*slurm)->rank, 1u);
  EXPECT_EQ((*slurm)->source, "SLURM_PROCID and SLURM_NTASKS");
}

TEST(Environment, wrong_ranks_name_their_variable) {
  for (const auto& [values, named] : std::vector<std::pair<std::map<std::string, std::string>, std::string>>{
           {{{"RANK", "x"}}, "RANK"},
           {{{"RANK", "-1"}}, "RANK"},
           {{{"RANK", "4"}, {"WORLD_SIZE", "4"}}, "WORLD_SIZE"},
           {{{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "0"}}, "SLURM_NTASKS"}}) {
    const auto rank = rank_from(from(values));
    ASSERT_FALSE(rank.ok());
    EXPECT_NE(rank.status().message().find(named), std::string::npos) << rank.status().message();
  }
}

TEST(Environment, rendezvous_has_an_order) {
  EXPECT_EQ(rendezvous({}), "none");
  EXPECT_EQ(rendezvous({{"SHARDPULL_RENDEZVOUS", "a"}, {"MASTER_ADDR", "b"}}), "a:29610");
  EXPECT_EQ(rendezvous({{"MASTER_ADDR", "b"}, {"MASTER_PORT", "29500"}, {"SLURM_JOB_NODELIST", "c"}}), "b:29501");
  EXPECT_EQ(rendezvous({{"MASTER_ADDR", "fd00::7"}, {"MASTER_PORT", "7"}}), "[fd00::7]:8");
  EXPECT_EQ(rendezvous({{"SLURM_STEP_NODELIST", "gpu[03-04]"}, {"SLURM_JOB_NODELIST", "gpu[01-04]"}}),
            "gpu03:29610");
  EXPECT_EQ(rendezvous({{"MASTER_ADDR", "b"}, {"MASTER_PORT", "65535"}}).substr(0, 6), "error:");
}

TEST(Environment, first_host_of_a_node_list) {
  EXPECT_EQ(first_host("gpu1"), "gpu1");
  EXPECT_EQ(first_host("gpu1,gpu2"), "gpu1");
  EXPECT_EQ(first_host("gpu[003-007,9],login1"), "gpu003");
  EXPECT_EQ(first_host("a,gpu[1-2]"), "a");
  EXPECT_EQ(first_host("rack[2,4]-ib,x"), "rack2-ib");
  EXPECT_EQ(first_host("gpu[1"), "gpu[1");
}

// A group of an IPv6 address was once taken for its port.
TEST(Environment, Case122_an_ipv6_host_without_a_port_is_not_split) {
  EXPECT_EQ(completed("2605:340:cd51:4600::1"), "[2605:340:cd51:4600::1]:29610");
  EXPECT_EQ(completed("2605:340:cd51:4600::1:7000"), "[2605:340:cd51:4600::1:7000]:29610");
  EXPECT_EQ(completed("[2605:340:cd51:4600::1]:7000"), "[2605:340:cd51:4600::1]:7000");
}

TEST(Environment, Case120_Case121_forms_of_a_rendezvous) {
  EXPECT_EQ(completed("::1"), "[::1]:29610");
  EXPECT_EQ(completed("[::1]"), "[::1]:29610");
  EXPECT_EQ(completed("[::1]:7000"), "[::1]:7000");
  EXPECT_EQ(completed("fe80::1%lo"), "[fe80::1%lo]:29610");
  EXPECT_EQ(completed("node7"), "node7:29610");
  EXPECT_EQ(completed("10.0.0.7:5000"), "10.0.0.7:5000");
  for (const char* const broken : {"[::1", "::1]", "", ":7000", "node7:", "node7:x", "node7:70000", "a b"}) {
    EXPECT_EQ(completed(broken).substr(0, 6), "error:") << broken;
  }
}

}  // namespace
}  // namespace shardpull::cli
