#include "base/strict_json.h"

#include <gtest/gtest.h>

#include <string>

namespace shardpull {
namespace {

// What nlohmann-json accepts by itself must be refused here, with the place and the rule.
TEST(StrictJson, ChecksWhatTheParserLetsPass) {
  EXPECT_TRUE(check_json(R"({"a":[1,2,{"b":null}],"c":"\u00e9"})", 4, "f").ok());

  const Status twice = check_json(R"({"a":1,"b":{"a":2,"a":3}})", 4, "f.json");
  EXPECT_EQ(twice.code(), StatusCode::kDataLoss);
  EXPECT_EQ(twice.message(), "f.json: the key \"a\" appears twice in one object (duplicate name)");
  EXPECT_EQ(check_json("[[[1]]]", 2, "f").message(), "f: more than 2 nested objects and arrays");
  EXPECT_TRUE(check_json("[[1]]", 2, "f").ok());
  EXPECT_NE(check_json(std::string("[1]\0", 4), 2, "f").message().find("control character 0x00 at offset 3"),
            std::string::npos);
  EXPECT_NE(check_json("[1] x", 2, "f").message().find("invalid JSON at byte 5"), std::string::npos);
}

// Surrogates, overlong forms, cut sequences and what lies above U+10FFFF are no UTF-8.
TEST(StrictJson, FindsTheFirstInvalidByte) {
  EXPECT_EQ(first_invalid_utf8("a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80"), std::nullopt);
  for (const char* const bad : {"\xC0\x80", "\xE0\x80\x80", "\xED\xA0\x80", "\xF0\x80\x80\x80",
                                "\xF4\x90\x80\x80", "\xE2\x82", "\xFF", "\x80"}) {
    EXPECT_EQ(first_invalid_utf8(std::string("ab") + bad), 2u) << in_quotes(bad);
  }
}

// A name is shown so that a terminal and a reader survive it.
TEST(StrictJson, QuotesNamesForMessages) {
  EXPECT_EQ(in_quotes("a\x1B\xFF\xC3\xA9"), "\"a\\x1b\\xff\xC3\xA9\"");
  EXPECT_EQ(in_quotes(std::string(300, 'x')), "\"" + std::string(256, 'x') + "\"... (300 bytes)");
}

}  // namespace
}  // namespace shardpull
