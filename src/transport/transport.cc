#include "transport/transport.h"

#include <cstdlib>
#include <utility>

#include <fmt/format.h>

namespace shardpull {
namespace {

constexpr ReadToken kPartToken = ReadToken{1} << 63;

}  // namespace

Result<std::shared_ptr<ExportedMemory>> Transport::adopt(const std::byte*, std::uint64_t bytes,
                                                         std::string_view what) {
  return Status(
      StatusCode::kUnimplemented,
      fmt::format(
          "the {} transport lets peers read only memory that it allocated, not the {} bytes of {}: allocate "
          "them with Trainer::allocate, or let them be packed",
          name(), bytes, what),
      {.reason = Reason::kBadArgument, .fault = Fault::kUser});
}

void Transport::read_parts(EndpointId endpoint, std::vector<ReadPart> parts, ReadToken token) {
  const auto whole = std::make_shared<PartialRead>();
  whole->token = token;
  whole->left = parts.size();
  for (const ReadPart& part : parts) {
    const ReadToken part_token = kPartToken | ++last_part_;
    part_reads_.emplace(part_token, whole);
    if (part.target != nullptr) {
      read_to(endpoint, part.remote, part.target, part_token);
    } else {
      read(endpoint, part.remote, part.local, part_token);
    }
  }
}

void Transport::read_to(EndpointId, const RemoteRef&, std::shared_ptr<ReadTarget>, ReadToken) {
  std::abort();  // the caller did not ask can_read_to()
}

void Transport::report_read(TransportSink& sink, ReadToken token, const Status& status) {
  if ((token & kPartToken) == 0) return sink.on_read_done(token, status);
  const auto found = part_reads_.find(token);
  if (found == part_reads_.end()) return;
  const std::shared_ptr<PartialRead> whole = std::move(found->second);
  part_reads_.erase(found);
  if (whole->status.ok()) whole->status = status;
  if (--whole->left == 0) sink.on_read_done(whole->token, whole->status);
}

}  // namespace shardpull
