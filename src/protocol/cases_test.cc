// Faults that systems of this kind have had, as small inputs to the machines; the numbers are those of the
// cases' list.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "protocol/protocol_testing.h"

namespace shardpull::protocol_testing {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const Status kBroken(StatusCode::kInternal, "EIO");

// A tied model's engine keeps two storages, and syncs send only the embedding: the head stayed old.
TEST(Cases, case_002_one_name_updates_both_modules_it_feeds) {
  TinyModel model = tiny_model({.groups = 3});  // module 2 is the head: fed by layer 0's name, not by its own
  model.recording.scatters[2].name = 0;
  ConsumerBench b(model.plan(0), 3);
  b.start(1, 1);
  b.run_to_end();
  ASSERT_EQ(b.machine.finish_update(0, 1, b.out), Status());
  b.part = part_of(model, *b.plan, some_names(model, {0}));
  b.take();
  b.start(2, 2);
  b.run_to_end();
  ASSERT_EQ(b.machine.finish_update(0, 2, b.out), Status());
  EXPECT_EQ(to_string(b.machine.modules()[0]), "current(2)");
  EXPECT_EQ(to_string(b.machine.modules()[1]), "current(1)");
  EXPECT_EQ(to_string(b.machine.modules()[2]), "current(2)");

  model.recording.scatters.push_back(model.recording.scatters[1]);  // a head that other names feed too: loud
  model.recording.scatters.back().destination = {2, DType::kF32, 0, {4, 4}, {4, 1}};
  const Status stale =
      restrict_plan(*b.plan, model.recording, *model.tables, some_names(model, {0})).status();
  EXPECT_THAT(stale.message(), AllOf(HasSubstr("'module2'"), HasSubstr("'layers.1.w0', which it does not")));
}

// The target trained, the draft frozen; the draft was post-processed again without new weights.
TEST(Cases, case_053_modules_outside_a_sync_are_neither_written_nor_processed) {
  const TinyModel model = tiny_model({.groups = 3});  // module 2 is the draft
  ConsumerBench b(model.plan(0), 3);
  b.start(1, 1);
  b.run_to_end();
  ASSERT_EQ(b.machine.finish_update(0, 1, b.out), Status());
  const auto target = part_of(model, *b.plan, some_names(model, {0, 1}));
  for (std::uint64_t sync = 2; sync <= 4; ++sync) {
    b.part = target;
    b.take();
    b.start(sync, sync);
    b.run_to_end();
    ASSERT_EQ(b.machine.finish_update(0, sync, b.out), Status());
    EXPECT_THAT(b.scattering(), ElementsAre(0u, 1u));
    EXPECT_THAT(b.posting(), ElementsAre(0u, 1u));
    EXPECT_EQ(to_string(b.machine.modules()[2]), "current(1)");
    EXPECT_EQ(*b.machine.version(), sync);
  }
}

// Two lists shared a tensor: the end of one took it from the other.
TEST(Cases, case_064_a_group_freed_beside_one_that_shares_its_storage_takes_nothing_from_it) {
  ProducerBench b({.groups = 2, .names_per_group = 2, .path = Path::kMapped});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  std::vector<PublishedView> first = b.views(0), second = b.views(1);
  for (PublishedView& view : first) view.location.where = {7, 1, 0, 64};
  for (PublishedView& view : second) view.location.where = {7, 1, 32, 64};  // overlaps, and each name twice
  ASSERT_EQ(b.machine.publish_group(0, 0, first, b.out), Status());
  b.pull(0, 0);
  b.pull(0, 1);
  b.signal(0, {0});
  ASSERT_EQ(b.count<producer_action::GroupFreed>(), 1u);
  ASSERT_EQ(b.machine.publish_group(0, 1, second, b.out), Status());
  b.take();
  b.pull(0, 2);
  ASSERT_EQ(b.count<producer_action::ReadyReply>(), 1u);
  const RemoteRef where = b.all<producer_action::ReadyReply>()[0].ready.entries.at(0).where;
  EXPECT_EQ(where, (RemoteRef{7, 1, 32, 64}));
  EXPECT_THAT(b.machine.unfreed(), ElementsAre(1u));
}

// A bucket shared by two readers; one acknowledged, and it was overwritten under the other.
TEST(Cases, case_085_a_slot_is_written_again_only_after_every_reader_is_done) {
  ProducerBench b({.groups = 8, .consumers = 2, .replicas = 2, .ring_depth = 2});
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  for (std::uint32_t g = 0; g < 8; ++g) ASSERT_EQ(b.publish(g), Status());
  for (std::uint32_t seq = 0; seq < 8; ++seq) {
    SCOPED_TRACE(seq);
    if (seq > 0) b.signal(0, {seq - 1});
    b.take();
    b.pull(0, seq);  // quick: it has landed what it read from this slot
    EXPECT_EQ(b.count<producer_action::Pack>(), 0u) << "the slow reader may still be at it";
    if (seq > 0) b.signal(1, {seq - 1});
    b.pull(1, seq);
    ASSERT_EQ(b.count<producer_action::Pack>(), 1u);
    EXPECT_EQ(b.all<producer_action::Pack>()[0].slot, seq % 2);
    b.finish_packs();
    EXPECT_EQ(b.count<producer_action::ReadyReply>(), 2u);
  }
}

// A tensor kept from chunk k for a destination that chunk k + 3 completes was overwritten in a ring of two.
TEST(Cases, case_086_what_is_needed_later_is_copied_out_before_its_slot_is_used_again) {
  ConsumerBench b({.groups = 4, .ring_depth = 2, .modules_span_groups = true});
  b.start(1, 10);
  b.ready(0);
  b.land(0);
  b.ready(1);
  b.land(1);
  b.ready(2);  // would go into the slot of chunk 0, whose half of the module is still being copied out
  EXPECT_THAT(b.transferring(), ElementsAre(0u, 1u));
  b.scattered(0);
  EXPECT_THAT(b.transferring(), ElementsAre(0u, 1u, 2u));
  b.run_to_end();
  b.scattered(1);
  b.run_to_end();
  EXPECT_THAT(b.posting(), ElementsAre(3u)) << "processed once, when all of it is there";
}

// The call returned while the last buffer was still being copied.
TEST(Cases, case_087_done_means_that_every_byte_is_in_place) {
  ConsumerBench b({.groups = 2});
  b.start(1, 10);
  for (const std::uint32_t chunk : {0u, 1u}) {
    b.ready(chunk);
    b.land(chunk);
  }
  b.scattered(0);
  b.ack_all();
  EXPECT_EQ(b.count<consumer_action::UpdateDone>(), 0u) << "the last scatter is slow";
  b.scattered(1);
  b.posted(0);
  EXPECT_EQ(b.count<consumer_action::UpdateDone>(), 0u) << "so is the last hook";
  b.posted(1);
  EXPECT_EQ(b.update_result(), Status());
  ASSERT_EQ(b.machine.finish_update(0, 1, b.out), Status());
  EXPECT_EQ(b.finish_result(), Status());
}

// A landing slot guarded by the last recorded event alone: the wait passed on an older record.
TEST(Cases, case_089_a_slot_waits_for_its_exact_use_before) {
  ConsumerBench b({.groups = 50, .ring_depth = 2});
  b.start(1, 10);
  std::map<std::uint32_t, std::uint32_t> reading;  // slot -> chunk whose scatter runs
  std::vector<std::uint32_t> late;
  std::size_t transfers = 0;
  for (std::uint32_t chunk = 0; chunk < 50; ++chunk) {
    b.ready(chunk);
    if (b.transferring().size() ==
        transfers) {  // it waits: now, and only now, the odd chunk before ends its scatter
      ASSERT_FALSE(late.empty());
      reading.erase(late.front() % 2);
      b.scattered(late.front());
      late.erase(late.begin());
    }
    ASSERT_EQ(b.transferring().size(), ++transfers);
    EXPECT_FALSE(reading.contains(b.all<consumer_action::StartTransfer>().back().slot));
    b.land(chunk);
    reading[chunk % 2] = chunk;
    if (chunk % 2 == 0) {
      b.scattered(chunk);
      reading.erase(0);
    } else {
      late.push_back(chunk);
    }
  }
  EXPECT_EQ(late.size(), 1u);
}

// Chunk borders or ring depths computed apart on each side.
TEST(Cases, case_091_sides_that_cut_differently_are_refused_naming_both) {
  ProducerBench b({.groups = 2, .names_per_group = 2, .consumers = 2, .replicas = 2});
  b.reserve(0);
  b.take();
  const auto other =
      tiny_model({.groups = 2, .names_per_group = 2, .consumers = 2, .replicas = 2, .max_chunk_bytes = 1024});
  const auto pulls = pulls_at(*other.plan(1), 0);
  b.machine.reserve(0, 1, b.life(1), 128, 2, 2, 1, pulls_digest(pulls, 2), pulls, b.out);
  EXPECT_THAT(b.all<producer_action::ReserveReply>().at(0).status.message(),
              AllOf(HasSubstr("worker 1 and worker 0 share serve slots"), HasSubstr("digests")));
  b.take();
  b.machine.reserve(0, 1, b.life(1), 64, 3, 2, 1, pulls_digest(b.pulls[1], 3), b.pulls[1], b.out);
  EXPECT_THAT(b.all<producer_action::ReserveReply>().at(0).status.message(),
              HasSubstr("is 3, of trainer 0 2"));
}

// A worker died during an update; everybody waited for ever.
TEST(Cases, case_092_a_dead_worker_is_named_and_the_next_sync_works) {
  ProducerBench b({.groups = 4, .consumers = 4});  // one replica
  b.reserve_all();
  ASSERT_EQ(b.begin(1), Status());
  ASSERT_EQ(b.publish(0), Status());
  ASSERT_EQ(b.publish(1), Status());
  for (std::uint32_t c = 0; c < 4; ++c) b.serve(c, 0);
  b.serve(2, 1);
  b.pull(3, 1);
  b.take();
  b.machine.consumer_lost(0, 2, Status(StatusCode::kUnavailable, "killed"), b.out);
  ASSERT_EQ(b.count<producer_action::SyncFailed>(), 1u);
  EXPECT_THAT(b.all<producer_action::SyncFailed>()[0].status.message(), HasSubstr("worker 2"));
  b.finish_packs();
  b.take();
  const Digest128 digest = pulls_digest(b.pulls[2], 2);
  b.machine.reserve(0, 2, 9002, 64, 2, 4, 4, digest, b.pulls[2], b.out);
  ASSERT_EQ(b.all<producer_action::ReserveReply>().at(0).status, Status());
  ASSERT_EQ(b.begin(2), Status());
  EXPECT_EQ(b.machine.live().size(), 4u);
  EXPECT_TRUE(b.machine.syncing());
}

// A bucket failed in mid-transfer; a lock was never released.
TEST(Cases, case_095_a_failed_sync_leaves_the_worker_able_to_run_the_next) {
  ConsumerBench b({.groups = 4});
  b.start(1, 1);
  for (const std::uint32_t chunk : {0u, 1u}) {
    b.ready(chunk);
    b.land(chunk);
    b.scattered(chunk);
    b.posted(chunk);
  }
  b.ready(2);
  b.land(2, 0, kBroken);
  EXPECT_THAT(b.update_result().message(), HasSubstr("chunk 2 (group 2) from trainer 0: EIO"));
  b.take();
  b.start(2, 2);
  b.run_to_end();
  ASSERT_EQ(b.machine.finish_update(0, 2, b.out), Status());
  EXPECT_EQ(*b.machine.version(), 2u);
}

// Two updates at the same time: the first caller never completed.
TEST(Cases, case_096_of_two_updates_at_once_the_second_is_refused) {
  ConsumerBench b({.groups = 2});
  b.start(5, 5);
  EXPECT_THAT(b.machine.start_update(0, 6, 6, nullptr, b.out).message(),
              HasSubstr("while updating in sync 5"));
  EXPECT_FALSE(b.machine.update(0, b.out).ok());
  b.run_to_end();
  EXPECT_EQ(b.update_result(), Status()) << "the first is not disturbed";
  ASSERT_EQ(b.machine.finish_update(0, 5, b.out), Status());
  EXPECT_FALSE(b.machine.finish_update(0, 5, b.out).ok()) << "ended twice";
  EXPECT_EQ(*b.machine.version(), 5u);

  SenderMachine sender({.world_size = 1, .num_consumers = 1});
  SenderActions out;
  sender.worker_joined(0);
  ASSERT_EQ(sender.begin(0, 5, {0}, out), Status());
  EXPECT_THAT(sender.begin(0, 6, {0}, out).message(), HasSubstr("while sync 5 runs"));
}

// An update failed part way, and the engine kept a mix of old and new layers without a word.
TEST(Cases, case_097_a_mixed_state_is_labelled_until_a_full_sync) {
  ConsumerBench b({.groups = 3, .ring_depth = 1});
  b.start(1, 1);
  b.run_to_end();
  ASSERT_EQ(b.machine.finish_update(0, 1, b.out), Status());
  b.take();
  b.start(2, 2);
  b.ready(0);
  b.land(0);
  b.scattered(0);
  b.posted(0);
  b.ready(1);
  b.land(1);
  b.scattered(1, kBroken);  // group 1 is half written
  const Status mixed = b.machine.version().status();
  EXPECT_THAT(mixed.message(),
              AllOf(HasSubstr("module 0 is prepared(2)"), HasSubstr("module 1 is mixed(1, 2)")));
  EXPECT_FALSE(b.machine.finish_update(0, 2, b.out).ok());
  b.take();
  b.start(3, 2);
  b.run_to_end();
  ASSERT_EQ(b.machine.finish_update(0, 3, b.out), Status());
  EXPECT_EQ(*b.machine.version(), 2u);
}

}  // namespace
}  // namespace shardpull::protocol_testing
