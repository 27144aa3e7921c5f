//! The text that `hapax serve` prints when it is ready: the API's address, the data's location, and example commands.

use std::fmt::Write as _;
use std::net::SocketAddr;

use hapax::core::StoreStatus;

use super::config::Config;
use super::url_of;
use crate::output;

/// The inputs of the text.
pub struct Banner<'a> {
    pub config: &'a Config,
    pub addresses: &'a [SocketAddr],
    pub place: &'a str,
    pub first_start: bool,
    pub status: &'a StoreStatus,
}

impl Banner<'_> {
    /// Prints it on standard output.
    pub fn print(&self) -> anyhow::Result<()> {
        output::raw(&self.text().expect("a string takes everything"))
    }

    fn text(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        writeln!(text, "Hapax {} is ready", env!("CARGO_PKG_VERSION"))?;
        for address in self.addresses {
            writeln!(text, "  API   {}", self.endpoint(*address))?;
        }
        writeln!(text, "  Data  {}", self.place)?;
        if let Some(paused) = &self.status.paused {
            writeln!(text, "  The store is paused: {paused}")?;
            writeln!(text, "  Let it deliver again with: {} resume", program())?;
        }
        if let (true, Some(address)) = (self.first_start, self.addresses.first()) {
            writeln!(text, "\nTry it, from another terminal:")?;
            for line in self.lines_to_paste(&self.endpoint(*address)) {
                writeln!(text, "  {line}")?;
            }
            writeln!(text)?;
        }
        Ok(text)
    }

    fn endpoint(&self, address: SocketAddr) -> String {
        url_of(address, self.config.tls.is_some())
    }

    /// Example commands. Each works on its own, in any order. If keys are needed, secrets are not printed.
    fn lines_to_paste(&self, endpoint: &str) -> [String; 3] {
        let region = &self.config.sqs.region;
        let (aws, python, token) = match self.config.auth.keys.first() {
            None => (
                "AWS_ACCESS_KEY_ID=any AWS_SECRET_ACCESS_KEY=any ".to_owned(),
                "aws_access_key_id='any', aws_secret_access_key='any'".to_owned(),
                String::new(),
            ),
            Some(key) => (
                format!("AWS_ACCESS_KEY_ID={0} AWS_SECRET_ACCESS_KEY=\"$SECRET\" ", key.id),
                format!("aws_access_key_id='{}', aws_secret_access_key='$SECRET'", key.id),
                format!("HAPAX_TOKEN=\"{}:$SECRET\" ", key.id),
            ),
        };
        let program = program();
        [
            format!(
                "{aws}aws --endpoint-url {endpoint} --region {region} sqs create-queue --queue-name hello"
            ),
            format!(
                "python3 -c \"import boto3; sqs = boto3.client('sqs', endpoint_url='{endpoint}', \
                 region_name='{region}', {python}); \
                 url = sqs.create_queue(QueueName='hello')['QueueUrl']; \
                 print(sqs.send_message(QueueUrl=url, MessageBody='hello')['MessageId'])\""
            ),
            format!("{token}{program} send --endpoint {endpoint} --create hello 'hello, world'"),
        ]
    }
}

/// This program as the user called it, quoted for a shell: `hapax` may not be on the path.
fn program() -> String {
    let name = std::env::args().next().unwrap_or_else(|| "hapax".to_owned());
    let plain = |c: char| c.is_alphanumeric() || "/._-+@%:,".contains(c);
    if name.chars().all(plain) { name } else { format!("'{}'", name.replace('\'', "'\\''")) }
}
